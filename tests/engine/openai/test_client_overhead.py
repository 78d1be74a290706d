"""The client's own cost, measured with a server that computes nothing."""

import math
from types import SimpleNamespace

import pytest

from labkit.engine.openai import client_overhead
from labkit.engine.openai.null_server import DEFAULT_MAX_TOKENS


def test_client_overhead_is_measured():
    overhead = client_overhead.measure(streams=3, silence_s=10.0)
    assert (
        overhead["streams"] == 3
        and overhead["chunks"] == 3 * DEFAULT_MAX_TOKENS * client_overhead.MEASURED_ROUNDS
    )
    for name in ("ttft_ms", "chunk_ms", "itl_ms"):
        times = overhead[name]
        assert 0 <= times["p50"] <= times["p99"] <= times["max"] < math.inf
    assert overhead["ttft_ms"]["p50"] > 0 and overhead["chunk_us"] > 0


def test_a_slow_client_is_detected(monkeypatch):
    """Each read is stamped 30 ms late; the overhead must show it."""
    from labkit.engine.openai import http_client

    stamp = http_client.ReceivedBytes
    monkeypatch.setattr(http_client, "ReceivedBytes", lambda at, data: stamp(at + 0.03, data))
    overhead = client_overhead.measure(streams=2, silence_s=10.0)
    assert overhead["chunk_ms"]["p50"] >= 30 and overhead["ttft_ms"]["p50"] >= 30


def test_a_prepared_engine_notes_its_client_overhead(opponent, ask):
    engine, _ = opponent()
    assert engine.notes["client"]["floor"] is None
    engine.prepare_requests(ask((300,), (301,)), 2)
    client = engine.notes["client"]
    assert client["floor"]["streams"] == 2 and client["most_late_ms"] == 50


def test_percentiles_of_no_values_are_none():
    assert client_overhead.percentiles_ms([]) is None
    assert client_overhead.percentiles_ms([0.001]) == pytest.approx({"p50": 1, "p99": 1, "max": 1})
    spread = [n / 1e3 for n in range(101)] + [0.2000004, 0.0]
    assert client_overhead.percentiles_ms(spread) == {"p50": 50.0, "p99": 99.98, "max": 200.0}
    assert client_overhead.percentiles_ms([1.23456e-3])["max"] == 1.235


def test_the_client_s_share_is_what_the_server_s_own_times_leave():
    """Received 2 ms late, sent off 3 ms late; the second chunk 1 ms later still."""

    def timing(sent, late):
        return SimpleNamespace(request_received=10.003, chunk_sent=sent, chunk_received=sent + late)

    timings = [timing(11.0, 0.002), timing(11.5, 0.003)]
    one = SimpleNamespace(submitted=10.0, response=SimpleNamespace(null_timings=timings))
    none = SimpleNamespace(submitted=10.0, response=SimpleNamespace(null_timings=[]))
    found = client_overhead._summarize([one, none], 0.004, 7)
    assert {name: found[name]["max"] for name in ("ttft_ms", "chunk_ms", "itl_ms")} == {
        "ttft_ms": 5.0, "chunk_ms": 3.0, "itl_ms": 1.0
    }  # fmt: skip
    assert (found["chunk_us"], found["streams"], found["chunks"]) == (2000.0, 7, 2)


def test_a_server_that_is_not_ready_is_tried_again_until_the_time_limit(monkeypatch):
    now, tried = [100.0], []

    def tries(ready):
        def send(client, keys, tokens):
            tried.append(keys)
            now[0] += 7.0
            return [SimpleNamespace(response=SimpleNamespace(ended=len(tried) == ready))]

        return send

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(client_overhead, "time", clock)
    monkeypatch.setattr(client_overhead, "_send_and_collect", tries(2))
    client_overhead._wait_until_ready(None)
    assert tried == [["try 1"], ["try 2"]]
    monkeypatch.setattr(client_overhead, "_send_and_collect", tries(0))
    with pytest.raises(client_overhead.EngineError, match="no token within 20 s"):
        client_overhead._wait_until_ready(None)
    assert len(tried) == 2 + 3


def test_every_request_has_a_connection_of_its_own(tiny_dir, run_load, ask):
    """A server may close a reused connection just when the next request is sent."""
    from labkit import config
    from labkit.engine import openai

    server = config.OpenAIServer(preset="null_server")
    engine = openai.create(config.Engine(name="openai", server=server), tiny_dir)
    try:
        engine.reset_counters()
        entries = run_load(engine, ask((300,), (301,), (302,)), together=1).entries
        assert [entry.outcome for entry in entries] == ["served"] * 3
        assert len(engine._client.connect_times_s) == 3
    finally:
        engine.close()
