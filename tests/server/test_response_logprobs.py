"""Tests of the log probabilities of prompts: ``echo`` and vLLM's ``prompt_logprobs``."""

import itertools
import json
from types import SimpleNamespace

import pytest
from fake_engine import CharTokenizer
from in_process import post, run_scenario
from test_routes import send

from labkit.engine.engine_protocol import Logprobs
from labkit.server.apis.completions_api import CompletionWriter, top_by_text
from labkit.server.apis.generated_choice import GeneratedChoice
from labkit.server.apis.response_logprobs import token_offsets
from labkit.server.types.openai_types import CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the old mill stands by the river"


def choices(server, path=COMPLETIONS, **fields):
    """Post a greedy request; return its choices."""
    body = json.dumps({"model": "tiny", "temperature": 0, "seed": 1, **fields})
    status, _, response = send(server, "POST", path, body)
    assert status == 200, response
    return response["choices"]


@pytest.fixture(scope="module")
def generated(server):
    """A greedy completion with its log probabilities."""
    fields = {"prompt": PROMPT, "max_tokens": 6, "logprobs": 2, "return_token_ids": True}
    (choice,) = choices(server, **fields)
    return choice


def test_tokens_have_the_same_log_probabilities_in_a_prompt(server, generated):
    prompt = generated["prompt_token_ids"] + generated["token_ids"]
    (echoed,) = choices(server, prompt=prompt, max_tokens=0, logprobs=2, echo=True)
    logprobs, count = echoed["logprobs"], len(generated["token_ids"])
    assert logprobs["tokens"][-count:] == generated["logprobs"]["tokens"]
    expected = generated["logprobs"]
    assert logprobs["token_logprobs"][-count:] == pytest.approx(
        expected["token_logprobs"], abs=1e-4
    )
    for top, other in zip(logprobs["top_logprobs"][-count:], expected["top_logprobs"], strict=True):
        assert top == pytest.approx(other, abs=1e-4)
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert (len(prompt), "length") == (len(logprobs["tokens"]), echoed["finish_reason"])
    assert echoed["text"] == PROMPT + generated["text"]
    for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert echoed["text"][at:].startswith(token)


def test_log_likelihoods_as_an_evaluator_requests_them(server, generated):
    """lm-eval sends token ids, generates one token and leaves out its entry."""
    context, continuation = generated["prompt_token_ids"], generated["token_ids"]
    wrong = [*continuation[:-1], (continuation[-1] + 1) % 100]
    fields = {"max_tokens": 1, "logprobs": 1, "echo": True}
    is_greedy = []
    for choice in choices(server, prompt=[context + continuation, context + wrong], **fields):
        logprobs = choice["logprobs"]
        own = logprobs["token_logprobs"][len(context) : -1]
        top = logprobs["top_logprobs"][len(context) : -1]
        assert len(own) == len(top) == len(continuation)
        is_greedy.append(
            all(value == max(others.values()) for value, others in zip(own, top, strict=True))
        )
    assert is_greedy == [True, False]


def test_an_echo_without_log_probabilities_is_only_the_prompt(server, generated):
    (choice,) = choices(server, prompt=PROMPT, max_tokens=6, echo=True)
    assert (choice["text"], choice["logprobs"]) == (PROMPT + generated["text"], None)
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "echo": True, "n": 2})
    response = send(server, "POST", COMPLETIONS, body)[2]
    assert [choice["text"] for choice in response["choices"]] == [PROMPT] * 2
    assert response["usage"]["completion_tokens"] == 0


def test_a_streamed_echo_equals_the_whole_one(server, lenient_client):
    fields = {"prompt": [PROMPT, "a"], "max_tokens": 3, "logprobs": 1, "echo": True}
    whole = choices(server, **fields)
    stream = lenient_client.completions.create(model="tiny", temperature=0, **fields, stream=True)
    texts, logprobs = ["", ""], [[], []]
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        parts = choice.logprobs
        logprobs[choice.index] += zip(
            parts.tokens, parts.token_logprobs, parts.top_logprobs, parts.text_offset, strict=True
        )
    assert texts == [choice["text"] for choice in whole]
    logprobs_of_first = whole[0]["logprobs"]
    for token, at in zip(
        logprobs_of_first["tokens"], logprobs_of_first["text_offset"], strict=True
    ):
        assert texts[0][at:].startswith(token)
    for streamed, choice in zip(logprobs, whole, strict=True):
        assert [list(column) for column in zip(*streamed, strict=True)] == [
            choice["logprobs"][name]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        ]


def test_prompt_logprobs_as_vllm_has_them(server, generated):
    prompt = generated["prompt_token_ids"] + generated["token_ids"]
    (choice,) = choices(server, prompt=prompt, max_tokens=1, prompt_logprobs=2)
    first, *entries = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None and len(entries) == len(prompt) - 1
    for token, entry in zip(prompt[1:], entries, strict=True):
        assert str(token) == next(iter(entry)) and len(entry) in (2, 3)
        ranked = sorted((item for item in entry.values() if item["rank"]), key=lambda i: i["rank"])
        assert [item["rank"] for item in ranked] == [1, 2]
        assert ranked[0]["logprob"] >= ranked[1]["logprob"]
        if len(entry) == 3:
            assert entry[str(token)]["rank"] is None
            assert entry[str(token)]["logprob"] <= ranked[1]["logprob"]
    greedy = entries[-len(generated["token_ids"]) :]
    assert [next(iter(entry.values()))["decoded_token"] for entry in greedy] == generated[
        "logprobs"
    ]["tokens"]
    assert {next(iter(entry.values()))["rank"] for entry in greedy} == {1}


def test_prompt_logprobs_of_a_chat(server):
    fields = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    body = json.dumps({"model": "tiny", "prompt_logprobs": 0, "return_token_ids": True, **fields})
    response = send(server, "POST", CHAT, body)[2]
    prompt, (first, *entries) = response["prompt_token_ids"], response["prompt_logprobs"]
    assert first is None and [[str(token)] for token in prompt[1:]] == list(map(list, entries))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"echo": True}, "echo"),
        (COMPLETIONS, {"priority": 1}, "priority"),
        (CHAT, {"priority": -1}, "priority"),
        (CHAT, {"priority": 0.5}, "priority"),
        (COMPLETIONS, {"prompt": ["x" * 9000] * 9, "echo": True, "logprobs": 9}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 9000, "prompt_logprobs": 20, "n": 9}, "prompt"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, path, fields, param):
    async def scenario(service, engine):
        body = {"model": "fake", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        del body["messages" if path == COMPLETIONS else "prompt"]
        status, text = await post(service, path, {**body, **fields})
        assert (status, json.loads(text)["error"]["param"]) == (400, param)
        assert not engine.submitted

    run_scenario(scenario, tmp_path)


def test_a_priority_reaches_an_engine_whose_queue_takes_it(tmp_path):
    prompts = {
        COMPLETIONS: {"prompt": ["a", "b"]},
        CHAT: {"messages": [{"role": "user", "content": "a"}], "n": 2},
    }

    async def scenario(service, engine):
        for (path, prompt), priority in itertools.product(prompts.items(), (-2, 0, None)):
            body = {"model": "fake", "max_tokens": 1, "priority": priority, **prompt}
            assert (await post(service, path, body))[0] == 200
        assert [one.priority for one in engine.submitted] == [-2, -2, 0, 0, 0, 0] * 2

    run_scenario(scenario, tmp_path, takes_priorities=True)


def test_mlx_lm_s_engine_is_said_to_take_no_priorities(tmp_path):
    async def scenario(service, engine):
        body = {"model": "fake", "prompt": "a", "priority": 1}
        for name, reason in (
            ("paged", "needs engine.scheduler.queue="),
            ("mlx_lm", "engine=mlx_lm "),
        ):
            service.engine_name = name
            error = json.loads((await post(service, COMPLETIONS, body))[1])["error"]
            assert error["message"].startswith(f"priority=1: {reason}")

    run_scenario(scenario, tmp_path)


def test_an_engine_without_log_probabilities_of_prompts_is_an_error(tmp_path):
    async def scenario(service, engine):
        body = {"model": "fake", "prompt": "ab", "prompt_logprobs": 0, "max_tokens": 1}
        assert (await post(service, COMPLETIONS, body))[0] == 500

    run_scenario(scenario, tmp_path)


def test_of_tokens_with_the_same_text_the_likeliest_counts():
    """An evaluator takes a token for the likeliest one if no value in the object is larger."""
    logprobs = Logprobs(-5.0, ((1, -0.5), (2, -1.0), (3, -2.0)))
    texts = {1: "\ufffd", 2: "a", 3: "\ufffd", 4: "\ufffd"}
    assert top_by_text(texts.get, 4, logprobs) == {"\ufffd": -0.5, "a": -1.0}


class Wrapping(CharTokenizer):
    """Decodes ids 0 and 1 as tokens that it adds to a text."""

    def decode(self, ids):
        return super().decode(ids).replace("\0", "<s>").replace("\1", "</s>")


def test_offsets_of_tokens_that_the_tokenizer_adds():
    ids = [0, *map(ord, "héy"), 1]
    assert token_offsets(Wrapping(), "héy", ids) == [0, 0, 1, 2, 3]
    assert token_offsets(Wrapping(), "<s>héy", ids) == [0, 3, 4, 5, 6]
    assert token_offsets(CharTokenizer(), "other", [ord("a")] * 7) == [0, 1, 2, 3, 4, 5, 5]


def test_all_tokens_of_a_character_begin_where_it_begins():
    class Bytes(CharTokenizer):
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    tokens = list("a\u65e5b".encode())
    request = CompletionRequest(model="m", prompt=[[1]], logprobs=0)
    service = SimpleNamespace(tokenizer=Bytes(), token_text=lambda token: "\ufffd")
    for sizes in ([5], [2, 1, 2]):  # whole, and streamed
        writer = CompletionWriter(service, request, "id", None, [[1]], [""], 1)
        ids, offsets = iter(tokens), []
        for size in sizes:
            part = [next(ids) for _ in range(size)]
            generated = GeneratedChoice(part, logprobs=[Logprobs(-1.0, ())] * size)
            offsets += writer._output_logprobs(0, generated).text_offset
        assert offsets == [0, 1, 1, 1, 2]
