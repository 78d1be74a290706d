"""Serving from KV memory in less than float32: fewer bytes, and no change but rounding."""

import functools

import numpy as np
import pytest
from architectures import settings as architecture
from small_models import CONFIGS, build_model_dir

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import NO_TOKEN, EngineError
from labkit.engine.memory_budget import model_footprint, plan
from labkit.engine.runner.logits_self_test import TOLERANCE
from labkit.machine.facts.simulated_macs import simulated_mac

LENGTHS = (3, 40, 17, 33, 1, 40)
HALVES = ("float16", "bfloat16")
QUANTISED = {"int8": 9, "int4": 5}  # bits per element, with scales and biases


def options(dtype, blocks=256, block_size=16, scheduler=None, **changes):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **(scheduler or {})}
    return config.Engine(
        kv=config.KV(dtype=config.KVDType(dtype), block_size=block_size),
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


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("dtype", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantised_memory_counts_integers_scales_and_biases(dtype, layout, model_dir):
    def served(name):
        chosen = options(name)
        if layout == "contiguous":
            kv = config.KV(layout=config.KVLayout.contiguous, dtype=config.KVDType(name))
            attention = config.Attention(backend="sdpa")
            chosen = config.Engine("contiguous", kv=kv, attention=attention, budget=chosen.budget)
        engine = create(chosen, model_dir("qwen3"))
        return engine.notes["self_test_difference"], *serve(engine)

    _, _, wide = served("float32")
    difference, tokens, counters = served(dtype)
    assert TOLERANCE["float32"] < difference <= TOLERANCE[dtype] / 2
    assert all(len(out) == 24 for out in tokens.values())
    assert counters[f"kv_dtype.{dtype}"] == wide["kv_dtype.float32"] > 0
    for name in ("peak_kv_bytes", "kv_used_bytes"):
        assert 32 * counters[name] == QUANTISED[dtype] * wide[name] > 0


def test_both_layouts_hold_the_same_numbers(model_dir):
    """The self-test computes the same tokens in both, so its difference has the same rounding."""
    notes = []
    for name, backend in (("paged", "fused"), ("contiguous", "sdpa")):
        kv = config.KV(layout=config.KVLayout[name], dtype=config.KVDType.int8)
        engine = config.Engine(name, kv=kv, attention=config.Attention(backend=backend))
        notes.append(create(engine, model_dir("llama")).notes["self_test_difference"])
    assert abs(notes[0] - notes[1]) < 1e-3 * notes[0]


LATENT = {**architecture("deepseek_v3"), "kv_lora_rank": 56}  # a key of 64 numbers


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({**CONFIGS["llama"], "head_dim": 96}, "the head dimension 96 is not a multiple of 64"),
        (LATENT, "the keys of a latent layer cannot be int8"),
    ],
    ids=["narrow", "latent"],
)
def test_heads_that_cannot_be_quantised_are_refused(layout, settings, reason, tmp_path):
    """The advice is a type that both layouts have."""
    path = build_model_dir(tmp_path / "m", settings)
    backend = "fused" if layout == "paged" else "sdpa"
    kv = config.KV(layout=config.KVLayout[layout], dtype=config.KVDType.int8)
    engine = config.Engine(layout, kv=kv, attention=config.Attention(backend=backend))
    with pytest.raises(EngineError, match=rf"^.*{reason}.*; set engine\.kv\.dtype=float32$"):
        create(engine, path)


@pytest.mark.parametrize(("name", "dtype"), [("rwkv7", "int8"), ("mamba2", "float16")])
def test_a_model_without_keys_and_values_has_no_type_for_them(name, dtype, tmp_path):
    """It would be an option without an effect, and the arms of a question would be the same."""
    path = build_model_dir(tmp_path / "m", architecture(name))
    with pytest.raises(EngineError, match=rf"dtype={dtype}: model_type={name} has recurrent st"):
        create(options(dtype), path)


@pytest.fixture(scope="module")
def expected(model_dir):
    """A function from a type to the tokens without any other choice, served once."""
    return functools.cache(lambda dtype: serve(create(options(dtype), model_dir("qwen3")))[0])


@pytest.mark.parametrize(
    "dtype", [*HALVES, pytest.param("int8"), pytest.param("int4", marks=pytest.mark.slow)]
)
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
def test_no_choice_changes_a_token(dtype, changes, engaged, model_dir, expected):
    tokens, counters = serve(create(options(dtype, **changes), model_dir("qwen3")))
    assert tokens == expected(dtype)
    assert counters[engaged] > 0


def test_a_budget_of_bytes_holds_more_blocks_of_fewer_bytes():
    model = model_footprint.from_shape(config.ModelShape(), "m")
    machine = simulated_mac("sim_m3_ultra_512gb")
    fixed = config.Budget(policy=config.BudgetPolicy.fixed, bytes=1 << 30)
    pools = {
        dtype: plan(
            config.Engine(kv=config.KV(dtype=config.KVDType(dtype)), budget=fixed),
            model,
            machine,
        )
        for dtype in ("float32", *HALVES, *QUANTISED)
    }
    wide = pools.pop("float32")
    for dtype, pool in pools.items():
        block = QUANTISED.get(dtype, 16) * wide.pool_bytes // (32 * wide.blocks)
        assert pool.blocks == (1 << 30) // block
        assert pool.pool_bytes == block * pool.blocks
