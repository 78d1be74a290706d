"""Tests of the engine's thread, and of the server when that thread is dead or stuck."""

import asyncio
import queue
import re
import threading
import time
from types import SimpleNamespace

import numba
import pytest
from fake_engine import CharTokenizer, FakeEngine
from fake_server import FakeModel
from in_process import get, run_scenario

from labkit import config
from labkit.engine.engine_protocol import NO_TOKEN, EngineError, KVBytes, TokenEvent
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.server.generation import engine_thread, service
from labkit.server.generation.engine_thread import EngineThread, warm_up
from labkit.server.generation.service import Service
from labkit.server.http import http_listener
from labkit.server.http.routes import create_app
from labkit.server.types.api_error import ApiError


def start_generation(service, max_tokens=4):
    return service.generate("call", [[1, 2]], SamplingParams(max_tokens=max_tokens), 1)


async def text_of(generation):
    return "".join([output.text async for outputs in generation.outputs() for output in outputs])


async def wait_until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_a_generation_streams_and_the_thread_closes_the_engine(tmp_path):
    async def scenario(service, engine):
        assert await get(service, "/health") == (200, {"status": "ok"})
        assert await text_of(start_generation(service)) == "aaaa"
        assert service.num_live == 0

    assert run_scenario(scenario, tmp_path).closed


@pytest.mark.parametrize("leak", [None, "blocks are leaked"])
def test_an_idle_engine_is_checked_once_and_a_leak_ends_the_thread(monkeypatch, leak):
    monkeypatch.setattr(engine_thread, "IDLE_CHECK_S", 0.002)
    checks, ended, checked = [], [], threading.Event()

    class Checking(FakeEngine):
        def check(self):
            assert not self.has_work()
            checks.append(1)
            checked.set()
            assert leak is None, leak

    thread = EngineThread(Checking(), lambda step: None, ended.append)
    thread.start()
    thread.submit(Request("a", (1, 2), SamplingParams(max_tokens=2)))
    assert checked.wait(5)
    time.sleep(0.01)
    thread.stop(5)
    assert checks == [1] and not thread.alive
    assert [str(error).split("\n")[0] for error in ended] == [str(leak)]


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS == 1, reason="the pool has one thread")
def test_the_engine_has_as_many_threads_as_the_process_was_given(tmp_path):
    """numba would use all threads of its pool: it stores their number per thread."""
    counts, before = [], numba.get_num_threads()
    numba.set_num_threads(1)

    async def scenario(service, engine):
        engine.before_step = lambda: counts.append(numba.get_num_threads())
        await text_of(start_generation(service))

    try:
        run_scenario(scenario, tmp_path)
    finally:
        numba.set_num_threads(before)
    assert set(counts) == {1}


def test_a_failed_step_stops_the_server_and_repeats_no_content(tmp_path, capfd):
    calls = []

    async def scenario(service, engine):
        def fail():
            raise RuntimeError("another client's content")

        generation = start_generation(service, max_tokens=100)
        engine.before_step = fail
        with pytest.raises(ApiError) as error_info:
            await text_of(generation)
        assert error_info.value.status == 500
        line = "the engine failed (RuntimeError); see the server's log"
        assert str(error_info.value) == line == service.engine_failure
        status, body = await get(service, "/health")
        assert status == 503 and body["error"]["message"] == line
        with pytest.raises(ApiError, match="see the server's log") as error_info:
            start_generation(service)
        assert error_info.value.status == 503

    run_scenario(scenario, tmp_path, on_engine_failure=lambda: calls.append(1))
    assert calls == [1]
    assert "Traceback" in capfd.readouterr().err  # shows where the step failed


def test_a_failed_engine_ends_the_server_although_a_client_waits(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(http_listener, "CLOSE_S", 0.1)
    engine, options = FakeEngine(), config.Server(port=0, grace_s=60)
    bound = http_listener.bind(options)

    def fail():
        raise RuntimeError

    async def main():
        service = Service(options, "fake", CharTokenizer(), engine, FakeModel(tmp_path))
        ready = asyncio.Event()
        serving = asyncio.create_task(
            http_listener.serve(service, create_app(service), bound, ready.set)
        )
        await ready.wait()
        _, half = await asyncio.open_connection(*bound.getsockname())
        half.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        engine.before_step = fail
        with pytest.raises(ApiError, match="the engine failed"):
            await text_of(start_generation(service))
        await asyncio.wait_for(serving, 20)
        half.close()
        return service.engine_failure

    assert "the engine failed" in asyncio.run(main())
    assert "CancelledError" not in capfd.readouterr().err  # of the request that has half arrived


def test_a_detokeniser_that_fails_ends_its_own_request_alone(tmp_path, capfd):
    class Failing(CharTokenizer):
        def decode(self, ids):
            if 7 in ids and len(ids) > 1:
                raise KeyError(7)
            return super().decode(ids)

    async def scenario(service, engine):
        failing = service.generate("failing", [[7]], SamplingParams(max_tokens=9), 1)
        assert await text_of(start_generation(service)) == "aaaa"
        with pytest.raises(ApiError, match="internal server error: KeyError") as error_info:
            await text_of(failing)
        assert error_info.value.status == 500 and service.num_live == 0
        assert (await get(service, "/health"))[0] == 200

    engine = run_scenario(scenario, tmp_path, tokenizer=Failing())
    assert engine.aborted == ["failing-0"] and "KeyError" in capfd.readouterr().err


def test_a_stuck_step_makes_the_server_unhealthy_until_it_ends(tmp_path):
    async def scenario(service, engine):
        resume = threading.Event()
        engine.before_step = resume.wait
        generation = start_generation(service)
        await wait_until(lambda: service.unhealthy_reason() is not None)
        status, body = await get(service, "/health")
        assert status == 503 and "stuck" in body["error"]["message"]
        with pytest.raises(ApiError) as error_info:
            start_generation(service)
        assert error_info.value.status == 503
        resume.set()
        assert await text_of(generation) == "aaaa"
        assert (await get(service, "/health"))[0] == 200

    run_scenario(scenario, tmp_path, stuck_s=0.05)


def test_the_event_loop_runs_while_a_step_computes(tmp_path):
    async def scenario(service, engine):
        resume = threading.Event()
        engine.before_step = resume.wait
        generation = start_generation(service)
        await wait_until(lambda: service._thread.busy_s > 0)
        for _ in range(100):  # would hang if the loop waited for the thread
            assert (await get(service, "/health"))[0] == 200
        resume.set()
        await text_of(generation)

    run_scenario(scenario, tmp_path)


class Preempting(FakeEngine):
    """An engine whose ``waiting`` requests get no tokens."""

    waiting = frozenset()

    def step(self):
        return [event for event in super().step() if event.request_id not in self.waiting]

    def is_running(self, request_id):
        return request_id in self.remaining and request_id not in self.waiting

    def kv_bytes(self):
        return KVBytes(0, 0)


def test_a_preempted_request_waits_until_it_is_admitted_again(tmp_path):
    async def scenario(service, engine):
        def counts():
            page = service.metrics_page().decode()
            pattern = r"^vllm:num_requests_{}{{.*}} (.*)$"
            return [
                float(re.search(pattern.format(state), page, re.MULTILINE).group(1))
                for state in ("running", "waiting")
            ]

        engine.before_step = lambda: time.sleep(0.005)
        params = SamplingParams(max_tokens=1 << 20)
        generation = service.generate("call", [[1], [2]], params, 1)
        await wait_until(lambda: counts() == [2, 0])
        times = generation.times["call-1"]
        admitted = times.admitted
        for waiting, expected in (({"call-1"}, [1, 1]), (set(), [2, 0])):
            engine.waiting = waiting
            await wait_until(lambda expected=expected: counts() == expected)
        assert times.admitted == admitted is not None
        generation.close()
        assert counts() == [0, 0]

    run_scenario(scenario, tmp_path, engine=Preempting())


def test_closing_a_generation_aborts_it(tmp_path):
    async def scenario(service, engine):
        generation = start_generation(service, max_tokens=1 << 20)
        await anext(generation.outputs())
        generation.close()
        await wait_until(lambda: engine.aborted)
        assert service.num_live == 0 and engine.aborted == ["call-0"]

    run_scenario(scenario, tmp_path)


class Reserving(FakeEngine):
    """An engine with KV memory for four requests."""

    def is_running(self, request_id):
        return request_id in self.remaining

    def kv_bytes(self):
        return KVBytes(len(self.remaining), 0, 4)


def test_the_memory_that_an_abort_frees_is_reported_without_a_further_step():
    steps = queue.SimpleQueue()
    thread = EngineThread(Reserving(), steps.put, lambda error: None)
    thread.start()
    thread.submit(Request("a", (1,), SamplingParams(max_tokens=1 << 30)))
    assert steps.get(timeout=10).kv_usage == 0.25
    thread.abort("a")
    while (last := steps.get(timeout=10)).kv_usage:
        pass
    assert (last.kv_usage, last.events, last.running, last.counters) == (0, [], set(), None)
    thread.stop(10)


def test_a_request_that_the_engine_refuses_is_a_bad_request(tmp_path):
    async def scenario(service, engine):
        engine.step = lambda: (
            engine.remaining.clear(),
            [TokenEvent("call-0", NO_TOKEN, "error", error="too big")],
        )[1]
        with pytest.raises(ApiError, match="too big") as error_info:
            await text_of(start_generation(service))
        assert error_info.value.status == 400

    run_scenario(scenario, tmp_path)


def test_stop_gives_live_requests_the_grace_period(tmp_path, monkeypatch):
    ahead = [0.0]  # seconds that the service's clock is ahead of the real one
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], time=time.time)
    monkeypatch.setattr(service, "time", clock)

    async def scenario(service, engine):
        engine.before_step = lambda: time.sleep(0.01)
        short, endless = (
            start_generation(service, 5),
            service.generate("other", [[1]], SamplingParams(max_tokens=1 << 20), 1),
        )
        texts = [asyncio.create_task(text_of(one)) for one in (short, endless)]
        stopping = asyncio.create_task(service.stop(600.0))
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="stopping"), service.preparing():
            pass
        assert await texts[0] == "aaaaa" and not texts[1].done()
        ahead[0] = 600.0
        with pytest.raises(ApiError, match="stopping"):
            await texts[1]
        with pytest.raises(ApiError, match="stopping"):
            start_generation(service)
        await stopping

    assert run_scenario(scenario, tmp_path).closed


def test_stop_does_not_wait_for_requests_to_finish(tmp_path):
    engine, steps = FakeEngine(), []
    thread = EngineThread(engine, steps.append, lambda error: None)
    thread.start()
    thread.submit(Request("a", (1,), SamplingParams(max_tokens=3)))
    thread.stop(timeout_s=None)
    assert not thread.alive and engine.closed


def test_the_last_tokens_are_passed_on_before_the_counters_are_read():
    """An idle engine may wait for a step in flight before it returns its counters."""
    engine, calls = FakeEngine(), []
    engine.counters = lambda: calls.append("counters") or {"tokens.computed": 1.0}
    ended = threading.Event()
    thread = EngineThread(engine, lambda step: calls.append(step), lambda error: ended.set())
    thread.start()
    thread.submit(Request("a", (1,), SamplingParams(max_tokens=2)))
    while len(calls) < 5:
        time.sleep(0.002)
    thread.stop(5)
    read, first, last, again, counted = calls
    assert read == again == "counters" and first.counters and len(first.events) == 1
    assert last.counters is None and last.events[0].finish_reason == "length"
    assert counted.counters == {"tokens.computed": 1.0} and not counted.events


def test_warm_up_raises_if_the_engine_cannot_generate():
    engine = FakeEngine()
    warm_up(engine, num_requests=3, vocab_size=128)
    # A prompt of one token alone needs a kernel that no other request needs.
    assert [len(one.prompt_token_ids) for one in engine.submitted] == [8, 1, 8, 8, 8]
    assert not engine.has_work()
    engine.step = lambda: (
        engine.remaining.clear(),
        [TokenEvent("x", NO_TOKEN, "error", error="no memory")],
    )[1]
    with pytest.raises(EngineError, match="cannot generate: no memory"):
        warm_up(engine, num_requests=1, vocab_size=128)
