"""Requests that fail before their stream starts, or in its middle, in the shape of each API."""

import asyncio
import json

import pytest
from fake_server import FakeServer
from in_process import get, post, run_scenario

from labkit.engine.engine_protocol import NO_TOKEN, TokenEvent
from labkit.server.apis import chat_api, messages_api, responses_api
from labkit.server.apis.completions_api import CompletionWriter

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/v1/responses": {"input": "hi", "max_output_tokens": 9},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
REASON = "the grammar cannot be enforced: too complex"


def fail_after(engine, num_tokens):
    """Let the engine fail to sample the next token of the request that has ``num_tokens``."""
    step, counts = engine.step, {}

    def failing_step():
        events = []
        for event in step():
            count = counts[event.request_id] = counts.get(event.request_id, 0) + 1
            if count > num_tokens:
                engine.remaining.pop(event.request_id, None)
                event = TokenEvent(event.request_id, NO_TOKEN, "error", error=REASON)
            events.append(event)
        return events

    engine.step = failing_step


def error_of(path, data):
    """Return the message and the type of an API's error object."""
    if path == "/v1/responses" and data.get("type") == "error":
        return data["message"], data["code"]  # an event of a stream
    if path == "/v1/messages":
        assert data["type"] == "error"
    return data["error"]["message"], data["error"]["type"]


def events_of(body):
    """Return the names and the data of a stream's events."""
    events = [dict(line.split(": ", 1) for line in event.split("\n"))
              for event in body.decode().strip().split("\n\n")]  # fmt: skip
    return [(event.get("event"), event["data"]) for event in events]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_failure_before_the_first_token_is_a_bad_request(path, stream, tmp_path):
    async def scenario(service, engine):
        fail_after(engine, 0)
        status, body = await post(
            service, path, {"model": "fake", "stream": stream, **BODIES[path]}
        )
        assert status == 400
        assert error_of(path, json.loads(body)) == (REASON, "invalid_request_error")
        assert (await get(service, "/health"))[0] == 200 and service.num_live == 0

    run_scenario(scenario, tmp_path)


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_in_the_middle_ends_the_stream_with_an_error_event(path, tmp_path):
    async def scenario(service, engine):
        fail_after(engine, 3)
        request = {"model": "fake", "stream": True, **BODIES[path]}
        short = request | {next(key for key in request if key.startswith("max_")): 3}
        failed, fine = await asyncio.gather(
            post(service, path, request), post(service, path, short)
        )
        check_error_event(path, failed, (REASON, "invalid_request_error"))
        assert fine[0] == 200 and REASON.encode() not in fine[1]

    run_scenario(scenario, tmp_path)


def check_error_event(path, response, expected):
    status, body = response
    *_, (name, data) = events = events_of(body)
    assert status == 200 and body.count(b"a") > 3
    if path in ("/v1/chat/completions", "/v1/completions"):  # these end with [DONE]
        assert data == "[DONE]"
        name, data = events[-2]
        assert name is None
    else:
        assert name == "error"
    assert error_of(path, json.loads(data)) == expected


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_is_formatted_too_long_is_a_timeout(path, tmp_path, monkeypatch):
    async def full_body(writer):
        await asyncio.sleep(60)

    monkeypatch.setattr(WRITERS[path], "full_body", full_body)
    with FakeServer(tmp_path, timeout_s=0.3) as server:
        status, body = server.post(path, {"model": "fake", **BODIES[path]})
    message = "the request took longer than 0.3 s (server.timeout_s)"
    assert (status, error_of(path, body)[0]) == (504, message)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_part_that_is_formatted_too_long_ends_the_stream_with_an_error_event(
    path, tmp_path, monkeypatch
):
    """All tokens are there, so the generation cannot fail any more."""
    events = WRITERS[path].events

    async def slow_events(writer):
        parts = [part async for part in events(writer)]
        yield parts[0]
        await asyncio.sleep(60)

    monkeypatch.setattr(WRITERS[path], "events", slow_events)

    async def scenario(service, engine):
        response = await post(service, path, {"model": "fake", "stream": True, **BODIES[path]})
        message = "the request took longer than 0.3 s (server.timeout_s)"
        check_error_event(path, response, (message, "timeout_error"))

    run_scenario(scenario, tmp_path, timeout_s=0.3)


WRITERS = {
    "/v1/chat/completions": chat_api.ChatWriter,
    "/v1/completions": CompletionWriter,
    "/v1/responses": responses_api.ResponseWriter,
    "/v1/messages": messages_api.MessageWriter,
}


@pytest.mark.parametrize("path", BODIES)
def test_an_unexpected_exception_ends_the_stream_with_an_error_event(
    path, tmp_path, monkeypatch, capfd
):
    """For example, an exception in a tool parser, after a part of the stream is sent."""
    events = WRITERS[path].events

    async def failing_events(writer):
        async for part in events(writer):
            yield part
            raise KeyError("another client's content")

    monkeypatch.setattr(WRITERS[path], "events", failing_events)

    async def scenario(service, engine):
        response = await post(service, path, {"model": "fake", "stream": True, **BODIES[path]})
        kind = "api_error" if path == "/v1/messages" else "server_error"
        check_error_event(path, response, ("internal server error: KeyError", kind))
        assert service.num_live == 0

    run_scenario(scenario, tmp_path)
    assert "KeyError" in capfd.readouterr().err
