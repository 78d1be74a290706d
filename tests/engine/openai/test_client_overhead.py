"""The client's own cost is measured by a server that computes nothing."""

import math

import pytest

from labkit.engine.openai import client_overhead
from labkit.engine.openai.null_server import DEFAULT_MAX_TOKENS


def test_client_overhead_is_measured():
    found = client_overhead.measure(streams=3, silence_s=10.0)
    assert (
        found["streams"] == 3
        and found["chunks"] == 3 * DEFAULT_MAX_TOKENS * client_overhead.MEASURED_ROUNDS
    )
    for name in ("ttft_ms", "chunk_ms", "itl_ms"):
        times = found[name]
        assert 0 <= times["p50"] <= times["p99"] <= times["max"] < math.inf
    assert found["ttft_ms"]["p50"] > 0 and found["chunk_us"] > 0


def test_a_slow_client_is_detected(monkeypatch):
    """Each block is stamped 30 ms late: the floor must say so, and not the null server."""
    from labkit.engine.openai import http_exchange

    stamp = http_exchange.ReceivedBytes
    monkeypatch.setattr(http_exchange, "ReceivedBytes", lambda at, data: stamp(at + 0.03, data))
    found = client_overhead.measure(streams=2, silence_s=10.0)
    assert found["chunk_ms"]["p50"] >= 30 and found["ttft_ms"]["p50"] >= 30


def test_a_prepared_engine_notes_its_client_overhead(opponent, ask):
    engine, _ = opponent()
    assert engine.notes["client"]["floor"] is None
    engine.prepare_requests(ask((300,), (301,)), 2)
    client = engine.notes["client"]
    assert client["floor"]["streams"] == 2 and client["most_late_ms"] == 50


def test_percentiles_of_no_values_are_none():
    assert client_overhead.percentiles_ms([]) is None
    assert client_overhead.percentiles_ms([0.001]) == pytest.approx({"p50": 1, "p99": 1, "max": 1})


def test_every_request_has_a_connection_of_its_own(tiny_dir, drive, ask):
    """One that is kept may be closed by a server just when it is used again."""
    from labkit import config
    from labkit.engine import openai

    server = config.Opponent(preset="null_server")
    engine = openai.create(config.Engine(name="openai", server=server), tiny_dir)
    try:
        engine.reset_counters()
        entries = drive(engine, ask((300,), (301,), (302,)), together=1).entries
        assert [entry.outcome for entry in entries] == ["served"] * 3
        assert len(engine._client.connect_times_s) == 3
    finally:
        engine.close()
