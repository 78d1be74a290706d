"""Attention switches in a serving engine change counters and no token."""

import threading

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import NO_TOKEN
from labkit.metal.emulator import EmulatorUnavailable, kernel_emulator
from labkit.metal.emulator.cpp_compilation import find_compiler

LENGTHS = (3, 20, 1)


def make_engine(path, pipeline=config.Pipeline.sync, **attention):
    return create(
        config.Engine(
            scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16),
            kv=config.KV(block_size=8),
            budget=config.Budget(blocks=32),
            attention=config.Attention(**attention),
            pipeline=pipeline,
        ),
        path,
    )


def serve(path, lengths=LENGTHS, max_tokens=8, **attention):
    """Return the tokens of every request, and the counters."""
    engine = make_engine(path, **attention)
    rng = np.random.default_rng(1)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, n in enumerate(lengths):
        engine.submit(Request(str(i), tuple(rng.integers(0, 298, n).tolist()), params))
    tokens = {}
    while engine.has_work():
        for event in engine.step():
            assert event.token != NO_TOKEN, event
            tokens.setdefault(event.request_id, []).append(event.token)
    counters = engine.counters()
    engine.close()
    return tokens, counters


@pytest.fixture(scope="module")
def plain(model_dir):
    """Tokens and counters without a switch; gemma3 has a window of 11 keys."""
    return serve(model_dir("gemma3"))


@pytest.mark.parametrize(
    ("switch", "engaged", "idle"),
    [
        ({"resolver": "padded_grid"}, "resolver.padded_grid", "resolver.binary_search"),
        (
            {"resolver": "padded_grid", "tile_threshold": 1000},
            "attention.surplus_threadgroups",
            "attention.search_iterations",
        ),
        ({"resolver": "work_plan"}, "resolver.work_plan", "attention.search_iterations"),
        ({"unit": "head"}, "unit.head", "gqa.shared"),
        ({"window_skip": False}, "window.masked_blocks", "window.skipped_blocks"),
        ({"tile_threshold": 1000}, "kernel.decode", "kernel.tiled"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_a_switch_changes_counters_and_no_token(model_dir, plain, switch, engaged, idle):
    tokens, counters = serve(model_dir("gemma3"), **switch)
    assert tokens == plain[0]
    assert counters[engaged] > 0
    assert counters.get(idle, 0) == 0


def test_without_switches_all_is_on(plain):
    counters = plain[1]
    for name in ("gqa.shared", "window.skipped_blocks", "kernel.tiled", "device.cpu"):
        assert counters[name] > 0, name
    for name in ("gqa.unshared", "window.masked_blocks", "split_kv.partitions"):
        assert counters.get(name, 0) == 0, name


def test_split_kv_serves(model_dir, plain):
    tokens, counters = serve(model_dir("gemma3"), split_kv="3")
    assert tokens == plain[0]  # the sums' order changes the last bits only
    assert counters["split_kv.partitions"] == 3 * counters["kernel.reduce"] > 0


@pytest.fixture
def compiler():
    """Skip the test if there is no compiler for emulated kernels."""
    try:
        find_compiler()
    except EmulatorUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
def test_emulated_kernels_serve(model_dir):
    how = {"lengths": (9, 1), "max_tokens": 2}
    emulated, counters = serve(model_dir("qwen3"), device=config.Device.emulated, **how)
    tokens, _ = serve(model_dir("qwen3"), **how)
    assert emulated == tokens
    assert counters["device.emulated"] > 0 and "device.cpu" not in counters


@pytest.mark.usefixtures("compiler")
def test_emulated_kernels_run_beside_the_host_in_overlapped_steps(model_dir, monkeypatch):
    """The emulator is not lazy: in the host's thread, a launch would wait for all kernels."""
    device, pipeline = config.Device.emulated, config.Pipeline.overlap
    engine = make_engine(model_dir("qwen3"), pipeline, device=device)
    threads, run_kernel = set(), kernel_emulator.run_kernel

    def run(*arguments, **options):
        threads.add(threading.get_ident())
        return run_kernel(*arguments, **options)

    monkeypatch.setattr(kernel_emulator, "run_kernel", run)
    engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=2, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert engine.counters()["pipeline.overlapped"] == 1
    assert len(threads) == 1 and threading.get_ident() not in threads
    engine.close()
