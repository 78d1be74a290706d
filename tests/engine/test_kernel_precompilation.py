"""Kernels are compiled in processes of their own before an engine is created."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import pytest

from labkit.config import Budget, Engine, KVDType, to_plain
from labkit.cpu.attention import (
    decode_attention_kernel,
    kernel_entry_points,
    tiled_attention_kernel,
)
from labkit.cpu.layers import activations, norms, rope
from labkit.cpu.matmul import gemm, int8_matmul, matmul_launch, quantized_matmul
from labkit.cpu.replay import graph_replay
from labkit.engine import create
from labkit.engine import kernel_precompilation as precompilation
from labkit.machine import source_dependency_digest
from labkit.machine.cache_entries import CacheError

FILL_CACHE, START = precompilation.fill_cache, precompilation.start  # conftest replaces ``start``


def needs(*formats):
    attention = to_plain(Engine().attention)
    known = {"attention": attention, "dtype": "float32", "replay": True, "activations": "float32"}
    return known | {"formats": formats}


def compiled():
    """The signatures of the kernels that an engine launches, and the functions that they call."""
    launched = kernel_entry_points.decode, kernel_entry_points.tiled, kernel_entry_points.scatter
    kernels = (
        *(*launched, graph_replay.replay, matmul_launch.launch, rope._rope, norms._rms_norm),
        *(activations._activate, gemm.pack_panels),
    )
    called = matmul_launch.compile_unit, quantized_matmul.format_functions
    return [kernel.signatures for kernel in kernels], [f.cache_info().currsize for f in called]


@pytest.mark.parametrize(("name", "bits"), [("qwen3", {0}), ("quantised", {4})])
def test_an_engine_finds_every_kernel_that_it_launches(name, bits, model_dir):
    formats = precompilation._formats(Engine(), model_dir(name))
    assert {form[1] for form in formats} == bits
    for _, step in precompilation.steps_for(needs(*formats)):
        step(needs(*formats))
    before = compiled()
    create(Engine(budget=Budget(blocks=40)), model_dir(name)).close()  # the self-test runs all
    assert compiled() == before


def test_only_what_a_model_needs_is_compiled():
    def count(**changes):
        return sum(kernels for kernels, _ in precompilation.steps_for(needs() | changes))

    quantised, floats = [("float16", 4, 32), ("float16", 8, 32)], [("float32", 0, 0)]
    assert count(formats=quantised) - count(formats=[]) == 1 + 2 * 5  # products, and two formats
    assert count(formats=floats) - count(formats=[]) == 2  # products, and the packing
    assert count(formats=[*quantised, *floats]) - count(formats=quantised) == 2
    by_int8 = count(formats=quantised, activations="int8") - count(formats=quantised)
    assert by_int8 == 1 + 2 * 4
    assert count(formats=[], replay=False) == count(formats=[]) - 2


def test_steps_are_taken_from_the_pipe_and_kernels_are_counted(monkeypatch, capfd):
    done = []
    monkeypatch.setattr(
        precompilation, "steps_for", lambda needs: [(count, done.append) for count in (3, 1)]
    )
    queue, writer = os.pipe()
    os.write(writer, bytes(range(2)))
    os.close(writer)
    precompilation.main({"dtype": "float32"}, queue)
    os.close(queue)
    assert len(done) == 2 and capfd.readouterr().out == "...."


def test_a_model_is_read_meanwhile_and_waiting_raises_what_went_wrong(monkeypatch):
    go = threading.Event()

    def fill_cache(options, model_dir):
        go.wait(10)
        raise CacheError("no space")

    monkeypatch.setattr(precompilation, "fill_cache", fill_cache)
    wait = START(Engine(), Path("model"))  # returns although the kernels are not compiled
    go.set()
    with pytest.raises(CacheError, match="no space"):
        wait()


def test_a_change_of_any_kernel_compiles_again():
    package = precompilation.SOURCES[0].parents[1]
    sources = [
        source_dependency_digest.read_sources(file, package) for file in precompilation.SOURCES
    ]
    modules = (
        decode_attention_kernel,
        tiled_attention_kernel,
        kernel_entry_points,
        graph_replay,
        matmul_launch,
    )
    for module in (*modules, rope, norms, activations, gemm, quantized_matmul, int8_matmul):
        path = f"{module.__name__.replace('.', '/')}.py"
        assert any(path in read for read in sources), path


@pytest.mark.parametrize("succeeds", [True, False])
def test_what_is_compiled_once_is_not_compiled_again(succeeds, monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    calls = []
    monkeypatch.setattr(
        precompilation, "_compile", lambda arguments, _: calls.append(arguments) or succeeds
    )
    for _ in range(2):
        FILL_CACHE(Engine(), tmp_path)
    half = Engine()
    half.kv.dtype = KVDType.float16
    FILL_CACHE(half, tmp_path)
    assert len(calls) == (2 if succeeds else 3) and '"float16"' in calls[-1] != calls[0]
    half.attention.backend = "gather"  # has no kernels of labkit's
    FILL_CACHE(half, tmp_path)
    assert len(calls) == (2 if succeeds else 3)


def test_a_long_compilation_says_once_how_far_it_is(monkeypatch):
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(precompilation.time, "monotonic", lambda: now[0])
    with precompilation._Progress(stream, 17) as progress:
        for _ in range(4):
            now[0] += 1
            progress.add(1)
    assert stream.getvalue() == "compiling 3 of 17 kernels (once per machine)\n"


def test_the_second_of_two_processes_waits_for_the_kernels_of_the_first(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    calls, streams = [], [io.StringIO(), io.StringIO()]
    second = threading.Thread(target=FILL_CACHE, args=(Engine(), tmp_path, streams[1]))

    def compile_while_the_other_waits(arguments, stream):
        calls.append(stream)
        second.start()
        for _ in range(2_000):
            if streams[1].getvalue():
                break
            time.sleep(0.001)
        return True

    monkeypatch.setattr(precompilation, "_compile", compile_while_the_other_waits)
    FILL_CACHE(Engine(), tmp_path, streams[0])
    second.join()
    assert calls == streams[:1]
    assert streams[1].getvalue() == "waiting for another process that compiles the kernels\n"
