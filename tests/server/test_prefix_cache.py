"""Tests of reported cached tokens, and of ``POST /reset_prefix_cache``."""

import http.client
import json
import time
from urllib.parse import urlsplit

import pytest
from fake_server import FakeServer

from labkit import config
from labkit.engine import openai
from labkit.engine.engine_protocol import EngineError
from labkit.engine.openai.server_process import ServerProcess
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams

SENTENCE = "the river runs past the old mill and the clock on its wall. " * 4
BLOCK = 16


def post(server, path, body=None):
    """Post JSON; return the status and the response's text."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("POST", path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


@pytest.fixture
def cold_server(server):
    """The shared server with an empty prefix cache."""
    deadline = time.monotonic() + 30  # a stream that an earlier test left may still run
    while (response := post(server, "/reset_prefix_cache"))[0] == 409:
        assert time.monotonic() < deadline
    assert response == (200, '{"status":"ok"}')
    return server


def of_openai(usage, prompt="prompt_tokens", details="prompt_tokens_details"):
    return usage[prompt], usage[details]["cached_tokens"]


def of_responses(usage):
    return of_openai(usage, "input_tokens", "input_tokens_details")


def of_messages(usage):
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


USER = [{"role": "user", "content": SENTENCE}]
CALLS = {
    "/v1/completions": ({"prompt": SENTENCE, "max_tokens": 2}, of_openai),
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 2}, of_openai),
    "/v1/responses": ({"input": SENTENCE, "max_output_tokens": 2}, of_responses),
    "/v1/messages": ({"messages": USER, "max_tokens": 2}, of_messages),
}


def usages(text):
    """Return every usage object in a response or a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "{" in line]
    events = [json.loads(line) for line in lines]
    events += [event[name] for event in events for name in ("response", "message") if name in event]
    return [event["usage"] for event in events if event.get("usage")]


@pytest.mark.parametrize("path", CALLS)
def test_cached_tokens_are_reported_whole_and_streamed(cold_server, path):
    fields, read = CALLS[path]
    body = {"model": "tiny", **fields}
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    for expect_hit in (False, True, True):
        prompt, cached = read(usages(post(cold_server, path, body)[1])[0])
        assert cached == (expect_hit and (prompt - 1) // BLOCK * BLOCK)
    streamed = usages(post(cold_server, path, {**body, "stream": True, **options})[1])
    full_usages = [usage for usage in streamed if len(usage) > 1]  # a message's last has one key
    assert full_usages and {read(usage) for usage in full_usages} == {(prompt, cached)}


def test_cached_tokens_are_those_from_before_the_request(cold_server):
    body = {"model": "tiny", "prompt": SENTENCE, "max_tokens": 1, "n": 3}
    cached = [of_openai(usages(post(cold_server, "/v1/completions", body)[1])[0])[1] for _ in "12"]
    assert cached[0] == 0 < cached[1]
    body["prompt"] = [SENTENCE, SENTENCE]  # both prompts have been cached, three choices each
    assert of_openai(usages(post(cold_server, "/v1/completions", body)[1])[0])[1] == 2 * cached[1]


def test_the_cache_is_not_reset_while_requests_run(cold_server, lenient_client):
    stream = lenient_client.completions.create(
        model="tiny", prompt="hello", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    status, text = post(cold_server, "/reset_prefix_cache")
    assert status == 409 and "1 completion running" in json.loads(text)["error"]["message"]
    stream.close()


def test_the_reset_needs_the_key(tmp_path):
    with FakeServer(tmp_path, api_key="sesame") as server:
        assert server.post("/reset_prefix_cache", b"")[0] == 401
        assert server.post("/reset_prefix_cache", b"", X_Api_Key="sesame")[0] == 200


def test_labkits_client_sees_what_the_servers_cache_held(cold_server, chat_model):
    options = config.OpenAIServer(preset="labkit", url=cold_server.url)
    engine_options = config.Engine(name="openai", server=options)
    openai.prepare(engine_options, chat_model)
    engine = openai.create(engine_options, chat_model)
    cached = []
    try:
        for name in ("cold", "warm", "cleared"):
            if name == "cleared":
                engine.clear_cache()
            engine.reset_counters()
            engine.submit(Request(name, tuple(range(100)), SamplingParams(max_tokens=2)))
            while engine.has_work():
                engine.wait(0.05)
                engine.step()
            cached.append(engine.counters()["tokens.cached"])
    finally:
        engine.close()
    assert cached == [0, 96, 0]


def test_a_cache_that_is_not_reset_is_an_error_of_one_line(tmp_path):
    with FakeServer(tmp_path, api_key="sesame") as server:
        url = f"http://127.0.0.1:{server.port}"
        kept = ServerProcess(config.OpenAIServer(preset="labkit", url=url), url, None)
        with pytest.raises(EngineError, match=r"not reset: this server needs a valid API key"):
            kept.reset_prefix_cache()
    with pytest.raises(EngineError, match=r"not reset: .*refused"):
        kept.reset_prefix_cache()
