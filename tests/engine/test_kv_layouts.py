"""Every KV layout and attention backend gives plain mlx_lm's tokens, and leaks nothing."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.base import NO_TOKEN

LENGTHS = (3, 8, 17, 40, 1, 33, 16, 15)
PRESETS = {
    "naive": {
        "kv": config.KV(layout=config.KVLayout.padded),
        "attention": config.Attention(backend="sdpa"),
    },
    "padded": {
        "kv": config.KV(layout=config.KVLayout.padded),
        "attention": config.Attention(backend="sdpa"),
    },
    "contiguous": {
        "kv": config.KV(layout=config.KVLayout.contiguous),
        "attention": config.Attention(backend="sdpa"),
    },
    "gather": {"attention": config.Attention(backend="gather")},
}
STATIC = {
    "admission": config.Admission.static,
    "order": config.Order.prefill_first,
    "composition": config.Composition.split,
}
SPLIT = {"order": config.Order.prefill_first, "composition": config.Composition.split}
SCHEDULER = {"naive": STATIC, "padded": SPLIT, "contiguous": {}, "gather": {}}


def options(preset, tokens=16, **budget):
    return config.Engine(
        name="paged" if preset == "gather" else preset,
        scheduler=config.Scheduler(
            max_num_seqs=4, max_num_batched_tokens=tokens, **SCHEDULER[preset]
        ),
        budget=config.Budget(**budget or {"blocks": 256}),
        **PRESETS[preset],
    )


def prompts():
    rng = np.random.default_rng(1)
    return [tuple(int(t) for t in rng.integers(0, 298, n)) for n in LENGTHS]


def serve(engine, requests):
    tokens, last = {}, {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for event in engine.step():
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                last[event.request_id] = event
        engine.check()
    return tokens, last


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "quantised"])
def test_greedy_tokens_equal_plain_mlx_lm(name, preset, model_dir, plain_greedy):
    """NumPy forward, sliding windows, and the MLX forward (quantised)."""
    engine = create(options(preset), model_dir(name))
    lengths = (1, 12, 5, 9, 3, 14, 8, 2)
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=n, ignore_eos=True))
        for i, (p, n) in enumerate(zip(prompts(), lengths, strict=True))
    ]
    tokens, last = serve(engine, requests)
    for i, (prompt, n) in enumerate(zip(prompts(), lengths, strict=True)):
        assert tokens[str(i)] == plain_greedy(name, prompt, n), f"{name}, prompt {i}"
        assert last[str(i)].finish_reason == "length"
    counters = engine.counters()
    layout = "padded" if preset == "naive" else "paged" if preset == "gather" else preset
    assert counters[f"layout.{layout}"] == counters["steps.total"]
    assert counters["steps.total"] == counters[f"engine.{engine.name}"] > 0
    assert counters["kernel.gather" if preset == "gather" else "kernel.sdpa"] > 0
    assert (counters["tokens.padded"] > 0) == (layout == "padded")
    assert 0 < counters["kv_used_bytes"] <= counters["peak_kv_bytes"]
    assert engine.kv_bytes().held == 0
    assert engine.notes["self_test_difference"] < 1e-5
