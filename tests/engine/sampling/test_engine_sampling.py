"""Sampling parameters through a whole engine."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import create
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams

PARAMS = [
    {},
    {"temperature": 0.8, "seed": 5, "logprobs": 2},
    {"temperature": 1.0, "top_k": 4, "repetition_penalty": 1.4},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 1.5, "min_p": 0.2, "frequency_penalty": 0.8},
    {"presence_penalty": 1.5, "logit_bias": {17: 3.0}, "logprobs": 3},
]
PROMPTS = [tuple(range(3 + i, 3 + i + length)) for i, length in enumerate((1, 9, 30, 4, 17, 2))]


@pytest.fixture(scope="module")
def engine(model_dir):
    scheduler = config.Scheduler(max_num_seqs=3, max_num_batched_tokens=24, chunk=7)
    options = config.Engine(
        scheduler=scheduler, kv=config.KV(block_size=8), budget=config.Budget(blocks=60)
    )
    engine = create(options, model_dir("qwen3"))
    yield engine
    engine.close()


def request(i, **changes):
    params = {"max_tokens": 6 + i, "ignore_eos": True, **PARAMS[i], **changes}
    return Request(f"r{i}", PROMPTS[i], SamplingParams(**params))


def serve(engine, arrivals):
    """Submit request ``i`` before step ``arrivals[i]``; return the events of each."""
    events, step, left = {}, 0, dict(arrivals)
    while left or engine.has_work():
        for i in [i for i, at in left.items() if at <= step]:
            engine.submit(request(i))
            del left[i]
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        step += 1
    return events


def test_requests_in_a_changing_batch_get_the_tokens_they_get_alone(engine):
    together = serve(engine, {i: 3 * i % 5 for i in range(len(PARAMS))})
    for i, params in enumerate(PARAMS):
        alone = serve(engine, {i: 0})[f"r{i}"]
        assert [e.token for e in alone] == [e.token for e in together[f"r{i}"]]
        for a, b in zip(alone, together[f"r{i}"], strict=True):
            assert (a.logprobs is None) == (b.logprobs is None) == ("logprobs" not in params)
            if a.logprobs is not None:
                assert len(a.logprobs.top) == len(b.logprobs.top) == params["logprobs"]
                np.testing.assert_allclose(a.logprobs.token, b.logprobs.token, atol=1e-4)


def test_penalties_and_bias_change_greedy_tokens(engine):
    plain = serve(engine, {0: 0})["r0"]
    engine.submit(request(0, logit_bias={250: 1000.0}))
    biased = []
    while engine.has_work():
        biased += [event.token for event in engine.step()]
    assert biased == [250] * len(plain)
    # Two tokens can win, and each loses what it gained with its next occurrence.
    pair = {250: 100.0, 251: 99.0}
    engine.submit(request(0, logit_bias=pair, frequency_penalty=2.0, max_tokens=40))
    alternating = []
    while engine.has_work():
        alternating += [event.token for event in engine.step()]
    assert set(alternating) == {250, 251}
    assert abs(alternating.count(250) - alternating.count(251)) <= 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop": ["a"]}, "stop texts need a tokenizer"),
        ({"logit_bias": {300: 1.0}}, "logit_bias names token 300; ids are 0 to 299"),
    ],
)
def test_unsupported_parameters_are_refused_for_that_request_only(engine, changes, reason):
    engine.submit(request(0, **changes))
    (event,) = engine.step()
    assert event.finish_reason == "error" and reason in event.error
    assert not engine.has_work()
