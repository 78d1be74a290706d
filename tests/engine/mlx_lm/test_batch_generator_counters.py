"""Counters of ``engine=mlx_lm``: computed tokens, padding and KV bytes."""

import time

import pytest
from mlx_lm_bench import LENGTHS, requests, serve

from labkit.engine.engine_protocol import KVBytes, Observable, TokenCounting


def test_counters_of_computed_tokens(shared):
    engine = shared("llama", 5)
    start = time.perf_counter()
    serve(engine, requests())
    wall_ms = (time.perf_counter() - start) * 1e3
    counters = engine.counters()
    assert counters["engine.mlx_lm"] == counters["steps.total"] > 0
    assert counters["tokens.prefill"] == sum(LENGTHS)
    assert counters["tokens.output"] == counters["tokens.decode"] == 12 * len(LENGTHS)
    assert counters["tokens.discarded"] == len(LENGTHS)
    assert counters["requests.submitted"] == counters["requests.finished"] == len(LENGTHS)
    assert counters["requests.aborted"] == counters["requests.refused"] == 0
    assert counters["blas.stock"] == 1
    parts = ("tokens.prefill", "tokens.decode", "tokens.padded")
    assert counters["tokens.computed"] == sum(counters[part] for part in parts)
    assert counters["step_ms"] == pytest.approx(counters["device_ms"] + counters["host_ms"])
    # Under 3 % with models and machines of use; this model is a toy, and the machine may be busy.
    assert 0 < counters["host_ms"] < 0.5 * wall_ms
    engine.reset_counters()
    assert engine.counters()["steps.total"] == engine.counters()["peak_kv_bytes"] == 0


@pytest.mark.parametrize("chunk", [None, 5])
def test_padding_is_counted_as_the_generator_computes_it(chunk, shared, monkeypatch):
    """Compared with the shapes that the model receives."""
    engine = shared("llama", chunk)
    model = type(engine._model.model)
    shapes, call = [], model.__call__

    def spy(self, inputs, *args, **kwargs):
        shapes.append(inputs.shape)
        return call(self, inputs, *args, **kwargs)

    monkeypatch.setattr(model, "__call__", spy)
    serve(engine, requests())
    counters = engine.counters()
    assert counters["tokens.padded"] > 0 and counters["kv.padded_slots"] > 0
    assert counters["tokens.computed"] == sum(rows * columns for rows, columns in shapes)
    assert max(columns for _, columns in shapes) == (chunk or 39)


def test_one_request_alone_has_no_padding(shared):
    engine = shared()
    serve(engine, requests()[3:4])
    assert engine.counters()["tokens.padded"] == engine.counters()["kv.padded_slots"] == 0


def test_peak_kv_bytes_is_the_peak_of_the_caches(shared):
    engine = shared()
    cache_bytes = []
    for request in requests():
        engine.submit(request)
    while engine.has_work():
        engine.step()
        cache_bytes.append(engine._generator.prompt_cache_nbytes)
    assert engine.counters()["peak_kv_bytes"] == max(cache_bytes) > 0


def test_the_kv_bytes_are_those_of_the_model(shared):
    """3 layers, keys and values, 2 heads of 64 float32; gemma3: two layers of 3 see 11 tokens."""
    layer = 2 * 2 * 64 * 4
    for name, expected in (("qwen3", 3 * 33 * layer), ("gemma3", (33 + 2 * 11) * layer)):
        engine = shared(name)
        assert isinstance(engine, Observable) and isinstance(engine, TokenCounting)
        request = requests()[5]
        engine.submit(request)
        assert not engine.is_running("5")
        while not engine.step():
            assert engine.is_running("5") and not engine.is_running("4")
        assert engine.computed_tokens() == engine.counters()["tokens.computed"] >= 33
        seen = engine.kv_bytes()
        assert seen.used == expected + (3 if name == "qwen3" else 1) * layer
        assert seen.reserved >= seen.used
        engine.abort("5")
        assert engine.kv_bytes() == KVBytes(0, 0) and not engine.is_running("5")
