"""Kernels are compiled in processes of their own before an engine is created."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest

from labkit.config import Engine, KVDType, Model, ModelShape, to_plain
from labkit.cpu.attention import attention_launch
from labkit.cpu.replay import graph_replay
from labkit.engine import kernel_precompilation as precompilation
from labkit.engine.llm import LLM
from labkit.engine.request import SamplingParams

FILL_CACHE, START = precompilation.fill_cache, precompilation.start  # conftest replaces ``start``


def needs(options=None):
    options = options or Engine()
    return {"attention": to_plain(options.attention), "dtype": "float32", "replay": True}


def variants():
    kernels = attention_launch.decode, attention_launch.tiled, attention_launch.scatter
    return [kernel.signatures for kernel in (*kernels, graph_replay.replay)]


def test_an_engine_finds_every_kernel_that_it_launches(monkeypatch):
    from labkit.models import resolve

    for _, step in precompilation.STEPS:
        step(needs())
    before = variants()
    assert all(before)
    shape = ModelShape(hidden_size=128, num_layers=2, vocab_size=1024, intermediate_size=256)
    with LLM(resolve(Model(name="llm_test", shape=shape)).path, blocks=40) as llm:
        llm.generate([[5], list(range(40))], SamplingParams(max_tokens=3, ignore_eos=True))
        llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert variants() == before


def test_steps_are_taken_from_the_pipe_and_kernels_are_counted(monkeypatch, capfd):
    done = []
    steps = tuple((count, done.append) for count in (3, 1))
    monkeypatch.setattr(precompilation, "STEPS", steps)
    queue, writer = os.pipe()
    os.write(writer, bytes(range(2)))
    os.close(writer)
    precompilation.main({"dtype": "float32"}, queue)
    os.close(queue)
    assert len(done) == 2 and capfd.readouterr().out == "...."


@pytest.mark.parametrize("succeeds", [True, False])
def test_what_is_compiled_once_is_not_compiled_again(succeeds, monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    calls = []
    monkeypatch.setattr(
        precompilation, "_compile", lambda arguments, _: calls.append(arguments) or succeeds
    )
    for _ in range(2):
        FILL_CACHE(Engine())
    half = Engine()
    half.kv.dtype = KVDType.float16
    FILL_CACHE(half)
    assert len(calls) == (2 if succeeds else 3) and '"float16"' in calls[-1] != calls[0]
    half.attention.backend = "gather"  # has no kernels of labkit's
    FILL_CACHE(half)
    assert len(calls) == (2 if succeeds else 3)


def test_a_long_compilation_says_once_how_far_it_is(monkeypatch):
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(precompilation.time, "monotonic", lambda: now[0])
    with precompilation._Progress(stream) as progress:
        for _ in range(4):
            now[0] += 1
            progress.add(1)
    total = sum(kernels for kernels, _ in precompilation.STEPS)
    assert stream.getvalue() == f"compiling 3 of {total} kernels (once per machine)\n"


def test_the_second_of_two_processes_waits_for_the_kernels_of_the_first(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    calls, streams = [], [io.StringIO(), io.StringIO()]
    second = threading.Thread(target=FILL_CACHE, args=(Engine(), streams[1]))

    def compile_while_the_other_waits(arguments, stream):
        calls.append(stream)
        second.start()
        for _ in range(2_000):
            if streams[1].getvalue():
                break
            time.sleep(0.001)
        return True

    monkeypatch.setattr(precompilation, "_compile", compile_while_the_other_waits)
    FILL_CACHE(Engine(), streams[0])
    second.join()
    assert calls == streams[:1]
    assert streams[1].getvalue() == "waiting for another process that compiles the kernels\n"
