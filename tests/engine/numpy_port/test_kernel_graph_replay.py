"""Replayed steps have the bits of the forward; steps that cannot be replayed run the forward."""

import gc
import itertools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numba
import numpy as np
import pytest

from labkit import config
from labkit.cpu.attention import kernel_entry_points
from labkit.cpu.replay import graph_replay
from labkit.cpu.replay.graph_replay import MAX_REPLAY_ROWS
from labkit.engine import Request, SamplingParams, create, engine_protocol
from labkit.engine.attention.backends.cpu_backend import CpuBackend
from labkit.engine.engine_protocol import Counters
from labkit.engine.runner.packed_forward import PackedForward
from labkit.engine.sampling import sampler

TOKENS = 12


def make(path, attention=None, kv=None, **options):
    return create(
        config.Engine(
            kv=config.KV(block_size=8, **(kv or {})),
            attention=config.Attention(**(attention or {})),
            budget=config.Budget(blocks=160),
            **options,
        ),
        path,
    )


def prompts(lengths):
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, 298, n).tolist()) for n in lengths]


def logits_of(engine, lengths=(7, 1, 18), tokens=TOKENS):
    """Serve, and return the bytes of every request's logits, token by token."""
    seen, sample = {}, sampler.sample_rows

    def capture(logits, states):
        for row, state in zip(logits[: len(states)], states, strict=True):
            seen[state.request_id, state.num_tokens] = row.tobytes()
        return sample(logits, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample_rows", capture)
        for i, ids in enumerate(prompts(lengths)):
            engine.submit(Request(str(i), ids, SamplingParams(max_tokens=tokens, ignore_eos=True)))
        while engine.has_work():
            engine.step()
    return seen


def replayed(engine):
    return engine.counters().get("forward.replayed", 0)


@pytest.fixture
def serve_unreplayed(monkeypatch):
    """A function that serves without replaying anything."""

    def serve(engine, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(PackedForward, "_replay", lambda *_: None)
            engine.reset_counters()
            seen = logits_of(engine, *arguments)
            assert not replayed(engine)
        return seen

    return serve


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3", {}),
        ("llama", {"attention": {"resolver": "seq_map", "unit": "head"}}),
        pytest.param("llama", {"kv": {"dtype": config.KVDType.float16}}, marks=pytest.mark.slow),
        ("llama", {"kv": {"dtype": config.KVDType.int8}}),
        ("gemma3", {}),  # windows of two kinds, a scaled embedding, gated GELU
        ("quantised", {}),
        ("quantised", {"activations": config.Activations.int8}),
        ("quantised", {"weights": config.Weights.float32}),
        ("qwen3", {"decode_shape": config.DecodeShape.fixed}),
        ("qwen3", {"pipeline": config.Pipeline.overlap}),
    ],
)
def test_a_replayed_step_has_the_bits_of_the_forward(model_dir, serve_unreplayed, model, options):
    engine = make(model_dir(model), **options)
    engine.reset_counters()
    seen = logits_of(engine)
    assert replayed(engine) >= TOKENS - 3
    counters = engine.counters()
    assert seen == serve_unreplayed(engine)
    kernels = ("kernel.decode", "attention.kv_blocks_visited", "attention.bytes")
    assert [counters[name] for name in kernels] == [engine.counters()[name] for name in kernels]


@pytest.mark.parametrize("replays", [True, False], ids=["replayed", "forward"])
def test_the_next_step_uses_a_changed_number_of_threads(model_dir, monkeypatch, replays):
    """The number changes while the same requests decode; the bits do not."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one core")
    engine, shares, before = make(model_dir("qwen3")), [], numba.get_num_threads()
    expected = logits_of(engine)
    name = "replay" if replays else "decode"
    module = graph_replay if replays else kernel_entry_points
    run, step, steps = getattr(module, name), engine.step, itertools.count()
    if not replays:
        monkeypatch.setattr(PackedForward, "_replay", lambda *_: None)

    def counting(*arguments):
        launch = arguments[4] if replays else kernel_entry_points.AttentionLaunch(*arguments[1:])
        shares.append((numba.get_num_threads(), launch.counters.shape[-2] - 1))
        return run(*arguments)

    def alternating():
        numba.set_num_threads(1 + next(steps) // 2 % 2)
        return step()

    monkeypatch.setattr(module, name, counting)
    monkeypatch.setattr(engine, "step", alternating)
    try:
        assert logits_of(engine) == expected
    finally:
        numba.set_num_threads(before)
    assert set(shares) == {(1, 1), (2, 2)}


def test_the_rotary_table_grows_during_replays(model_dir, serve_unreplayed):
    engine = make(model_dir("qwen3"))
    seen = logits_of(engine, (250,))
    assert replayed(engine) >= TOKENS - 1
    assert seen == serve_unreplayed(engine, (250,))


def test_engines_of_one_model_have_kv_memory_of_their_own(model_dir, monkeypatch):
    from labkit.engine.runner.shared_models import SharedModels

    models, path = SharedModels(), model_dir("qwen3")
    options = config.Engine(kv=config.KV(block_size=8), budget=config.Budget(blocks=64))
    first, second = (create(options, path, models) for _ in range(2))
    expected = logits_of(first)
    assert logits_of(second) == expected
    monkeypatch.setattr(CpuBackend, "bind", None)  # each engine's layers are bound already
    assert logits_of(first) == expected
    assert logits_of(second) == expected
    assert replayed(first) and replayed(second)
    memory = weakref.ref(first._loop._launcher.run_model.memory.attention)
    first.close()
    del first
    gc.collect()
    assert memory() is None


def test_counters_of_replays_do_not_pile_up_until_they_are_read(
    model_dir, serve_unreplayed, monkeypatch
):
    monkeypatch.setattr(engine_protocol, "MOST_DEFERRED", 2)
    engine = make(model_dir("qwen3"))
    engine.reset_counters()
    for _ in range(4):
        logits_of(engine, (7,), 3)
    assert len(engine._counters._deferred) == 2
    assert replayed(engine) == 8
    launches = engine.counters()["kernel.decode"]
    serve_unreplayed(engine, (7,), 3)
    assert launches == 4 * engine.counters()["kernel.decode"] > 0


def test_steps_of_many_rows_are_not_replayed(model_dir):
    engine = make(model_dir("qwen3"), scheduler=config.Scheduler(max_num_seqs=MAX_REPLAY_ROWS + 1))
    engine.reset_counters()
    logits_of(engine, [1] * (MAX_REPLAY_ROWS + 1), 3)
    assert engine.counters()["forward.numpy"] > 1
    assert not replayed(engine)


@pytest.mark.parametrize("wrong", [-1, 300])
def test_a_step_with_an_unknown_token_is_not_replayed(model_dir, wrong):
    engine = make(model_dir("qwen3"))
    model, batches = engine._loop._launcher.run_model, []
    engine._loop._launcher.run_model = lambda batch: batches.append(batch) or model(batch)
    logits_of(engine)
    _, step = model.memory.prepare_step(batches[-1])
    for tokens in (batches[-1].tokens, np.full_like(batches[-1].tokens, wrong)):
        batch = batches[-1]._replace(tokens=tokens)
        logits = model._forward._graph_runner.run(batch, step.attention, step.metadata, Counters())
        assert (logits is None) == (tokens[0] == wrong)


def test_partitions_are_not_replayed(model_dir):
    engine = make(model_dir("qwen3"), attention={"split_kv": "2"})
    logits_of(engine)
    assert not replayed(engine)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("qwen3", {"attention": {"backend": "gather"}}, "the attention is GatherBackend"),
        ("qwen3", {"dtype": config.DType.float16, "attention": {"backend": "gather"}}, "on MLX"),
        ("gemma3", {"kv": {"window_pools": True}}, "engine.kv.window_pools=true has several"),
        ("qwen3", {}, None),
    ],
)
def test_an_engine_notes_why_its_steps_are_not_replayed(model_dir, model, options, reason):
    engine = make(model_dir(model), **options)
    logits_of(engine)
    assert (replayed(engine) > 0) == (reason is None)
    noted = engine.notes["not_replayed"]
    assert noted is None if reason is None else reason in noted


def test_a_model_that_cannot_be_captured_is_served_and_says_why(tmp_path):
    from small_models import COMMON, build_model_dir

    settings = {**COMMON, "model_type": "starcoder2", "norm_epsilon": 1e-5}
    engine = make(build_model_dir(tmp_path / "starcoder2", settings))
    assert len(logits_of(engine)) == 3 * TOKENS
    assert not replayed(engine)
    assert "\n" not in engine.notes["not_replayed"]


def test_a_replay_with_a_wrong_stamp_is_refused(model_dir, monkeypatch):
    from labkit.engine.attention.backends import replay_state
    from labkit.engine.engine_protocol import StaleLaunchError

    engine = make(model_dir("qwen3"))
    monkeypatch.setattr(replay_state, "launch_stamp", lambda nonce, *_: nonce + 1)
    with pytest.raises(StaleLaunchError, match="layer 0"):
        logits_of(engine)


@pytest.mark.slow
def test_16_threads_have_the_bits_of_one_and_work_for_each(tmp_path):
    """In a process whose pool has 16 threads, on as many cores as there are."""
    script = Path(__file__).with_name("logits_by_threads.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        env=os.environ | {"NUMBA_NUM_THREADS": "16", "PYTHONPATH": str(script.parents[3])},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {len(each) for each in found["digests"].values()} == {5}
    assert all(len(set(each.values())) == 1 for each in found["digests"].values())
    for kind, by_threads in found["steps"].items():
        # A layer has four products and attention, and one thread's work between each two of them;
        # int8 quantises attention's output, too.
        most = (11 if kind == "int8" else 10) * found["layers"] + 1
        assert all(step["waits"] <= most for step in by_threads.values())
        for threads, step in by_threads.items():
            for tasks, units in step["products"]:
                assert units >= min(int(threads), tasks)
                assert kind != "float32" or units >= int(threads)
