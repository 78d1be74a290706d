"""A server's log probabilities of a prompt become the engine's, or the request fails."""

import json

import numpy as np
import pytest

from labkit.engine.openai.http_client import CompletedResponse, ReceivedBytes
from labkit.engine.openai.remote_engine import WRONG_SHAPE, ScoredResponse
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams

REQUEST = Request("r", (7, 8, 9), SamplingParams(prompt_logprobs=2, max_tokens=1))
POSITIONS = [
    None,
    {"8": {"logprob": -3.0, "rank": 9}, "5": {"logprob": -0.5}, "6": {"logprob": -1.0}},
    {"4": {"logprob": -1.5}, "9": {"logprob": -0.25}},
]


def answer(positions, error=None, **fields):
    body = json.dumps({"choices": [{"prompt_logprobs": positions}], **fields}).encode()
    parts = [ReceivedBytes(1.0, body[:9]), ReceivedBytes(2.0, body[9:])]
    response = ScoredResponse(REQUEST)
    return response, response.final_event(CompletedResponse("1 r", 2.5, parts, error))


def test_positions_become_arrays_the_likeliest_token_first():
    response, event = answer(POSITIONS, usage={"prompt_tokens": 3, "completion_tokens": 1})
    assert (event.finish_reason, event.received, response.usage.prompt) == ("length", 2.5, 3)
    logprobs = event.prompt_logprobs
    assert logprobs.tokens.tolist() == [-3.0, -0.25]
    assert logprobs.top_ids.tolist() == [[5, 6], [9, 4]] and logprobs.top_ids.dtype == np.int32
    assert logprobs.top.tolist() == [[-0.5, -1.0], [-0.25, -1.5]]
    assert logprobs.scored.shape == (2, 0)


@pytest.mark.parametrize(
    "positions",
    [
        None,
        POSITIONS[:2],
        [*POSITIONS, None],
        [None, None, POSITIONS[2]],
        [None, {"8": {"logprob": -1.0}}, POSITIONS[2]],
        [None, {"5": {"logprob": -1.0}, "6": {"logprob": -2.0}}, POSITIONS[2]],
        [None, {"8": {"logprob": "NaN"}, "6": {"logprob": -2.0}}, POSITIONS[2]],
        {"1": 2},
    ],
)
def test_an_answer_about_another_prompt_is_an_error(positions):
    _, event = answer(positions)
    assert event.finish_reason == "error" and event.error == f"request r: {WRONG_SHAPE}"


def test_an_error_of_the_server_is_passed_on():
    _, event = answer(POSITIONS, error="400: prompt_logprobs is too large")
    assert event.error == "request r: 400: prompt_logprobs is too large"


def test_the_body_asks_for_the_prompt_alone(opponent):
    engine, stub = opponent(preset="vllm")
    engine.submit(REQUEST)
    while engine.has_work():
        engine.wait(0.05)
        events = engine.step()
    assert "error" in {event.finish_reason for event in events}  # the stub streams text instead
    (body,) = stub.received_bodies
    assert body["prompt"] == [7, 8, 9] and body["prompt_logprobs"] == 2
    assert body["max_tokens"] == 1 and "stream" not in body
    assert engine.counters()["requests.failed"] == 1
