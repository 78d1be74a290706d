"""The client's own cost, measured with a server that computes nothing."""

import math

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
    from labkit.engine.openai import http_exchange

    stamp = http_exchange.ReceivedBytes
    monkeypatch.setattr(http_exchange, "ReceivedBytes", lambda at, data: stamp(at + 0.03, data))
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
