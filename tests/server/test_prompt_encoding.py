"""Tests of the bounds that are checked before a prompt is tokenised."""

import asyncio
import json
import threading
import time

import pytest
from fake_engine import CharTokenizer, ToolTokenizer
from fake_server import FakeServer
from in_process import post, run_scenario

from labkit import config
from labkit.models.tokenizer import LONG_TEXT
from labkit.server.generation.http_response import GenerationResponse
from labkit.server.types.api_error import ApiError

USER = {"role": "user", "content": "a"}
CALL = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
LONG = "a" * 101
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that accepts 100 characters and 8 completions."""
    folder = tmp_path_factory.mktemp("fake")
    with FakeServer(folder, max_prompt_tokens=100, max_live=8) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/v1/completions", {"prompt": LONG}, "at least 101 tokens"),
        ("/v1/completions", {"prompt": ["a", LONG[:50], LONG]}, "at least 101 tokens"),
        ("/v1/completions", {"prompt": ["a"] * 9}, "needs 9 completions"),
        ("/v1/completions", {"prompt": ["a"] * 5, "n": 2}, "needs 10 completions"),
        ("/v1/completions", {"prompt": [[1]] * 9}, "needs 9 completions"),
        (CHAT, {"messages": [USER] * 101}, "101 messages and parts"),
        (CHAT, {"messages": [{**USER, "content": LONG}]}, "at least 102 tokens"),
        (
            CHAT,
            {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * 100}]},
            "101 messages and parts",
        ),
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 100}]},
            "103 messages and parts",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 100}]},
            "102 mess",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {f"{i:0200}": 0 for i in range(1025)}},
            "1025 ids; the limit is 1024",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"choice": ["a"] * (1 << 18)}},
            "the grammar has 1310720 bytes or more",
        ),
        ("/v1/messages", {"messages": [USER] * 101, "max_tokens": 1}, "101 messages and parts"),
        ("/v1/responses", {"input": [USER] * 101}, "101 messages and parts"),
        ("/v1/responses", {"input": LONG}, "at least 102 tokens"),
        ("/tokenize", {"prompt": LONG}, "at least 101 tokens"),
        ("/detokenize", {"tokens": [1] * 5000}, "5000 ids"),
    ],
)
def test_lengths_are_refused_before_tokenising(server, path, fields, reason):
    server.tokenizer.encoded.clear()
    status, body = server.post(path, {"model": "fake", **fields})
    assert status == 400 and reason in body["error"]["message"]
    assert all(len(text) <= 100 for text in server.tokenizer.encoded)
    assert len(server.tokenizer.encoded) < 8


ENDED = [USER, {"role": "assistant", "content": "b"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {}},
        {"messages": ENDED},
        {"messages": ENDED, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": ENDED, "continue_final_message": False, "add_generation_prompt": True},
        {"messages": ENDED, "add_generation_prompt": False},
        {"messages": [USER], "chat_template_kwargs": {"mood": "good"}},  # refused
    ],
)
def test_tokenize_counts_the_prompt_of_the_same_chat(tmp_path, fields):
    async def scenario(service, engine):
        status, chat = await post(service, CHAT, {"model": "fake", "max_tokens": 1, **fields})
        tokenized = await post(service, "/tokenize", {"add_special_tokens": False, **fields})
        assert tokenized[0] == status == (400 if fields.get("chat_template_kwargs") else 200)
        chat, tokenized = json.loads(chat), json.loads(tokenized[1])
        if status == 200:
            assert tokenized["count"] == chat["usage"]["prompt_tokens"]
            assert tuple(tokenized["tokens"]) == engine.submitted[0].prompt_token_ids
        else:
            assert tokenized == chat

    run_scenario(scenario, tmp_path, tokenizer=ToolTokenizer())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "add_special_tokens": True, "tools": []}, None),
        ({"prompt": "a", "add_special_tokens": False}, "only true for prompt"),
        ({"messages": [USER], "add_special_tokens": True}, "and false for messages"),
        ({"prompt": "a", "tools": [TOOL]}, "tools needs messages"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt needs messages"),
    ],
)
def test_tokenize_refuses_what_would_have_no_effect(server, fields, message):
    status, body = server.post("/tokenize", fields)
    assert status == (200 if message is None else 400)
    assert message is None or message in body["error"]["message"]


def test_the_longest_prompt_is_served(server):
    status, body = server.post("/v1/completions", {"model": "fake", "prompt": LONG[1:]})
    assert status == 200 and body["usage"]["prompt_tokens"] == 100
    prompts = {"model": "fake", "prompt": ["a"] * 4, "n": 2}
    assert server.post("/v1/completions", prompts)[0] == 200


@pytest.mark.parametrize("n", [1, 2])
def test_every_prompt_of_a_completion_has_its_own_room(server, monkeypatch, n):
    """The context has room for 12 tokens after the first prompt, for 20 after the others."""
    monkeypatch.setattr(server.service, "max_model_len", 100)
    request = {"model": "fake", "prompt": ["a" * 88, "b", "aaa"], "max_tokens": 20, "n": n}
    status, body = server.post("/v1/completions", {**request, "return_token_ids": True})
    assert status == 200
    lengths = [len(choice["token_ids"]) for choice in body["choices"]]
    assert lengths == [12] * n + [20] * n * 2


@pytest.mark.parametrize("depth", [600, 900])
def test_deeply_nested_arguments_are_refused(tmp_path, depth):
    """The JSON decoder takes both depths."""
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    with FakeServer(tmp_path, special_tokens_in_content=config.SpecialTokens.escape) as server:
        status, body = server.post(CHAT, {"model": "fake", "messages": messages})
    assert status == 400 and "nested too deeply" in body["error"]["message"]


@pytest.mark.parametrize("choice", config.SpecialTokens)
@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"messages": [{**USER, "content": "a<s>b"}], "max_tokens": 1}, "ua<s>b"),
        ("/v1/responses", {"input": "a<s>b", "max_output_tokens": 1}, "ua<s>b"),
        ("/v1/messages", {"messages": [{**USER, "content": "<s>"}], "max_tokens": 1}, "u<s>"),
        ("/v1/completions", {"prompt": "a<s>b"}, "a<s>b"),
    ],
)
def test_special_tokens_in_content(tmp_path, choice, path, fields, text):
    with FakeServer(tmp_path, special_tokens_in_content=choice) as server:
        assert server.post(path, {"model": "fake", **fields})[0] == 200
    pieces = server.tokenizer.encoded
    assert "".join(pieces) == text
    escapes = choice is config.SpecialTokens.escape and path != "/v1/completions"
    assert any("<s>" in piece for piece in pieces) is not escapes


WORD = "x" * 3000
ECHOES = [
    (CHAT, {"messages": [USER], "model": WORD}),
    (CHAT, {"messages": [USER], WORD: 1}),
    (CHAT, {"messages": [{**USER, WORD: 1}]}),
    (CHAT, {"messages": [{**USER, "role": WORD}]}),
    (CHAT, {"messages": [USER], "logit_bias": {WORD: 1}}),
    (CHAT, {"messages": [USER], "tool_choice": WORD}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1, "model": WORD}),
    (f"/{WORD}", {}),
]


@pytest.mark.parametrize(("path", "fields"), ECHOES)
def test_a_message_does_not_repeat_a_long_text_of_the_client(server, path, fields):
    status, body = server.post(path, {"model": "fake", **fields})
    assert 400 <= status < 500
    assert all(len(str(text)) < 400 for text in body["error"].values())


class SlowTokenizer(CharTokenizer):
    """Tokenises long texts as soon as ``proceed`` is set."""

    def __init__(self):
        super().__init__()
        self.proceed = threading.Event()

    def encode(self, text, *, special=True):
        if len(text) >= LONG_TEXT:
            self.proceed.wait(30)
        return super().encode(text, special=special)


SLOW = {"prompt": "a" * LONG_TEXT}


def test_short_texts_do_not_wait_for_long_ones(tmp_path):
    tokenizer = SlowTokenizer()

    async def scenario(service, engine):
        slow = [asyncio.ensure_future(post(service, "/tokenize", SLOW)) for _ in range(24)]
        for path, fields in ((CHAT, {"messages": [USER]}), ("/v1/completions", {"prompt": "a"})):
            assert (await post(service, path, {"model": "fake", "max_tokens": 1, **fields}))[
                0
            ] == 200
        assert not any(task.done() for task in slow)
        tokenizer.proceed.set()
        assert {status for status, _ in await asyncio.gather(*slow)} == {200}

    run_scenario(scenario, tmp_path, tokenizer=tokenizer)


def test_requests_in_preparation_count_and_end_in_time(tmp_path):
    tokenizer = SlowTokenizer()

    async def scenario(service, engine):
        slow = [asyncio.ensure_future(post(service, "/tokenize", SLOW)) for _ in range(2)]
        await asyncio.sleep(0)
        status, body = await post(service, "/tokenize", {"prompt": "a"})
        assert status == 429 and b"2 requests in preparation; the limit is 2" in body
        for status, body in await asyncio.gather(*slow):
            assert status == 504 and b"longer than 0.2 s (server.timeout_s)" in body
        assert (await post(service, "/tokenize", {"prompt": "a"}))[0] == 200
        tokenizer.proceed.set()

    run_scenario(scenario, tmp_path, tokenizer=tokenizer, max_live=2, timeout_s=0.2)


def test_a_text_that_waits_when_the_server_stops_is_refused(tmp_path):
    tokenizer = SlowTokenizer()

    async def scenario(service, engine):
        slow = [asyncio.ensure_future(post(service, "/tokenize", SLOW)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await service.stop(0.0)
        with pytest.raises(ApiError, match="the server is stopping"):
            await service.run_in_thread(len, "a")
        tokenizer.proceed.set()
        first, second = await asyncio.gather(*slow)
        assert first[0] == 200  # its text was being tokenised
        assert second[0] == 503 and b"the server is stopping" in second[1]

    run_scenario(scenario, tmp_path, tokenizer=tokenizer)


def test_a_request_counts_once(tmp_path):
    """Either as one in preparation or as the completions that it has submitted."""
    counts = []

    async def scenario(service, engine):
        generate = service.generate

        def submit(*arguments, **options):
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: counts.append((service._num_preparing, service.num_live)))
            return generate(*arguments, **options)

        service.generate = submit
        body = {"model": "fake", "prompt": "a", "max_tokens": 1000}
        assert (await post(service, "/v1/completions", body))[0] == 200

    run_scenario(scenario, tmp_path)
    assert counts == [(0, 1)]


def test_the_time_of_the_preparation_is_a_part_of_the_requests(tmp_path, monkeypatch):
    class Slow(CharTokenizer):
        def encode(self, text, *, special=True):
            time.sleep(0.02)
            return super().encode(text, special=special)

    send_response = GenerationResponse.__call__

    async def check_time(response, *arguments):
        assert 0.02 < response.spent_s < 600
        response.spent_s = 600.0
        await send_response(response, *arguments)

    monkeypatch.setattr(GenerationResponse, "__call__", check_time)

    async def scenario(service, engine):
        body = {"model": "fake", "prompt": "a", "max_tokens": 1 << 20}
        assert (await post(service, "/v1/completions", body))[0] == 504

    run_scenario(scenario, tmp_path, tokenizer=Slow(), timeout_s=600)
