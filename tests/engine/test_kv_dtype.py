"""Serving from half-precision KV memory: half the bytes, and no change but rounding."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.budget import model_footprint, plan
from labkit.engine.engine_protocol import NO_TOKEN
from labkit.engine.logits_self_test import TOLERANCE
from labkit.machine import memory_capacity

LENGTHS = (3, 40, 17, 33, 1, 40)
HALVES = ("float16", "bfloat16")


def options(dtype, blocks=256, block_size=16, scheduler=None, **changes):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **(scheduler or {})}
    return config.Engine(
        kv=config.KV(dtype=config.Precision(dtype), block_size=block_size),
        scheduler=config.Scheduler(**limits),
        budget=config.Budget(blocks=blocks),
        **changes,
    )


def serve(engine):
    """Serve prompts of which two are equal; return tokens by request, and the counters."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(0, 298, n).tolist()) for n in LENGTHS]
    prompts[-1] = prompts[1]
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=24, ignore_eos=True)))
    tokens = {}
    while engine.has_work():
        for event in engine.step():
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
    counters = engine.counters()
    engine.close()
    return tokens, counters


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "quantised"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_holds_half_the_bytes(name, dtype, model_dir):
    """NumPy forward, sliding windows, and the MLX forward (quantised)."""
    wide = create(options("float32"), model_dir(name))
    half = create(options(dtype), model_dir(name))
    assert wide.notes["self_test_difference"] <= TOLERANCE["float32"]
    # Coarser, or nothing was rounded; but far from what a wrong key would make.
    assert TOLERANCE["float32"] < half.notes["self_test_difference"] <= TOLERANCE[dtype] / 2
    _, expected = serve(wide)
    tokens, counters = serve(half)
    assert all(len(out) == 24 for out in tokens.values())
    assert counters[f"kv_dtype.{dtype}"] == expected["kv_dtype.float32"] > 0
    assert "kv_dtype.float32" not in counters
    for name in ("kv_block_bytes", "peak_kv_bytes", "kv_used_bytes"):
        assert 2 * counters[name] == expected[name] > 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("changes", "engaged"),
    [
        ({"block_size": 8}, "block_size.8"),
        ({"scheduler": {"max_num_seqs": 1}}, "kernel.tiled"),
        ({"scheduler": {"max_num_batched_tokens": 64, "chunk": 7}}, "kernel.tiled"),
        ({"attention": config.Attention(resolver="seq_map")}, "resolver.seq_map"),
        ({"prefix_cache": config.PrefixCache.hash}, "prefix.hit_tokens"),
        ({"prefix_cache": config.PrefixCache.radix}, "prefix.hit_tokens"),
        (
            {"blocks": 8, "scheduler": {"reservation": config.Reservation.optimistic}},
            "preemptions",
        ),
        ({"speculation": config.Speculation.ngram}, "spec.drafted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_choice_changes_a_token(dtype, changes, engaged, model_dir):
    expected, _ = serve(create(options(dtype), model_dir("qwen3")))
    tokens, counters = serve(create(options(dtype, **changes), model_dir("qwen3")))
    assert tokens == expected
    assert counters[engaged] > 0


def test_a_budget_of_bytes_holds_twice_the_blocks():
    model = model_footprint.from_shape(config.ModelShape(), "m")
    machine = memory_capacity.simulated_mac("sim_m3_ultra_512gb")
    fixed = config.Budget(policy=config.BudgetPolicy.fixed, bytes=1 << 30)
    pools = {
        dtype: plan(
            config.Engine(kv=config.KV(dtype=config.Precision(dtype)), budget=fixed),
            model,
            machine,
        )
        for dtype in ("float32", *HALVES)
    }
    wide = pools.pop("float32")
    for half in pools.values():
        assert half.blocks == 2 * wide.blocks
        assert half.pool_bytes == wide.pool_bytes
