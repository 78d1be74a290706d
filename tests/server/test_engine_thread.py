"""The engine's thread: what the server says and does when it is dead, or stuck."""

import asyncio
import json
import threading
import time

import pytest
from engines import Engine, Words

from labkit import config
from labkit.engine.engine_protocol import NO_TOKEN, EngineError, TokenEvent
from labkit.engine.request import Request, SamplingParams
from labkit.server.api_error import ApiError
from labkit.server.engine_thread import EngineThread, warm_up
from labkit.server.routes import create_app
from labkit.server.serving_service import Service


class Model:
    vocab_size, max_context, eos_token_ids = 128, None, (0,)

    def __init__(self, path):
        self.path = path


def run(scenario, tmp_path, **options):
    """Run a scenario with a service around a fake engine; return the engine."""
    engine = Engine()

    async def main():
        service = Service(config.Server(**options), "fake", Words(), engine, Model(tmp_path))
        await service.start()
        try:
            await asyncio.wait_for(scenario(service, engine), 30)
        finally:
            await service.stop(0.0)

    asyncio.run(main())
    return engine


async def get(service, path):
    """Ask the application; return the status and the body."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": [],
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "asgi": {"version": "3.0"}, "server": ("localhost", 80), "client": ("localhost", 1),
    }  # fmt: skip
    await create_app(service)(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent[1:]))


def begin(service, max_tokens=4):
    return service.generate("call", [[1, 2]], SamplingParams(max_tokens=max_tokens), 1)


async def text_of(generation):
    return "".join([piece.text async for pieces in generation.pieces() for piece in pieces])


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_a_generation_comes_in_pieces_and_the_thread_closes_the_engine(tmp_path):
    async def scenario(service, engine):
        assert await get(service, "/health") == (200, {"status": "ok"})
        assert await text_of(begin(service)) == "aaaa"
        assert service.num_live == 0

    assert run(scenario, tmp_path).closed


def test_a_step_that_fails_kills_the_thread_and_the_server_says_so(tmp_path, capfd):
    async def scenario(service, engine):
        def fail():
            raise RuntimeError("no\nmore")

        generation = begin(service, max_tokens=100)
        engine.before_step = fail
        with pytest.raises(ApiError) as caught:
            await text_of(generation)
        assert caught.value.status == 500 and "RuntimeError: no more" in str(caught.value)
        status, body = await get(service, "/health")
        assert (
            status == 503 and "thread is dead (RuntimeError: no more)" in body["error"]["message"]
        )
        with pytest.raises(ApiError) as caught:
            begin(service)
        assert caught.value.status == 503

    run(scenario, tmp_path)
    assert "Traceback" in capfd.readouterr().err  # whoever runs the server learns where


def test_a_step_that_does_not_end_is_unhealthy_until_it_does(tmp_path):
    async def scenario(service, engine):
        go_on = threading.Event()
        engine.before_step = go_on.wait
        generation = begin(service)
        await until(lambda: service.trouble() is not None)
        status, body = await get(service, "/health")
        assert status == 503 and "stuck" in body["error"]["message"]
        with pytest.raises(ApiError) as caught:
            begin(service)
        assert caught.value.status == 503
        go_on.set()
        assert await text_of(generation) == "aaaa"
        assert (await get(service, "/health"))[0] == 200

    run(scenario, tmp_path, stuck_s=0.05)


def test_the_loop_goes_on_while_a_step_computes(tmp_path):
    async def scenario(service, engine):
        go_on = threading.Event()
        engine.before_step = go_on.wait
        generation = begin(service)
        await until(lambda: service._thread.busy_s > 0)
        for _ in range(100):  # a loop that waited for the thread would never get here
            assert (await get(service, "/health"))[0] == 200
        go_on.set()
        await text_of(generation)

    run(scenario, tmp_path)


def test_closing_aborts_and_later_events_are_dropped(tmp_path):
    async def scenario(service, engine):
        generation = begin(service, max_tokens=1 << 20)
        await anext(generation.pieces())
        generation.close()
        await until(lambda: engine.aborted)
        assert service.num_live == 0 and engine.aborted == ["call-0"]

    run(scenario, tmp_path)


def test_what_the_engine_refuses_is_a_bad_request(tmp_path):
    async def scenario(service, engine):
        engine.step = lambda: (
            engine.left.clear(),
            [TokenEvent("call-0", NO_TOKEN, "error", error="too big")],
        )[1]
        with pytest.raises(ApiError, match="too big") as caught:
            await text_of(begin(service))
        assert caught.value.status == 400

    run(scenario, tmp_path)


def test_a_stop_lets_what_runs_go_on_then_ends_it(tmp_path):
    async def scenario(service, engine):
        engine.before_step = lambda: time.sleep(0.01)
        short, endless = (
            begin(service, 5),
            service.generate("other", [[1]], SamplingParams(max_tokens=1 << 20), 1),
        )
        texts = asyncio.gather(text_of(short), text_of(endless), return_exceptions=True)
        stopping = asyncio.create_task(service.stop(1.5))
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="stopping"):
            begin(service)
        first, second = await texts
        assert first == "aaaaa" and isinstance(second, ApiError)
        await stopping

    assert run(scenario, tmp_path).closed


def test_commands_wait_for_no_step(tmp_path):
    engine, steps = Engine(), []
    thread = EngineThread(engine, steps.append, lambda error: None)
    thread.start()
    thread.submit(Request("a", (1,), SamplingParams(max_tokens=3)))
    thread.stop(timeout_s=None)
    assert not thread.alive and engine.closed


def test_the_warm_up_generates_and_says_if_it_cannot():
    engine = Engine()
    warm_up(engine, rows=3, vocab_size=128)
    assert not engine.has_work()
    engine.step = lambda: (
        engine.left.clear(),
        [TokenEvent("x", NO_TOKEN, "error", error="no memory")],
    )[1]
    with pytest.raises(EngineError, match="does not generate: no memory"):
        warm_up(engine, rows=1, vocab_size=128)
