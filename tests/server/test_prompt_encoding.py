"""Tests of the bounds that are checked before a prompt is tokenised."""

import pytest
from fake_server import FakeServer

from labkit import config

USER = {"role": "user", "content": "a"}
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


@pytest.mark.parametrize("choice", config.SpecialTokens)
@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"messages": [{**USER, "content": "a<s>b"}]}, "ua<s>b"),
        ("/v1/responses", {"input": "a<s>b"}, "ua<s>b"),
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
