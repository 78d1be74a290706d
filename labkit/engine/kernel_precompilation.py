"""Compile an engine's kernels while its model is read, in two processes of their own.

The processes fill numba's cache, and the engine's process loads the kernels from there. So both
cores compile, no kernel is compiled twice, and the compiler's memory is gone when the model is
loaded. What is missing here (a kernel for a format of weights) is compiled when it is needed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from labkit import config
from labkit.config import from_plain, to_plain
from labkit.engine.model import dtype_resolution
from labkit.machine import cache_entries, source_dependency_digest
from labkit.machine.processes import parent_death
from labkit.models import safetensors_header

PROCESSES = 2
SHOW_AFTER_S = 2.0  # a shorter compilation is not shown
POLL_S = 0.1
_PACKAGE = Path(__file__).resolve().parents[1]
# What the steps compile is in these files and in those that they import.
SOURCES = (
    Path(__file__).resolve(),
    _PACKAGE / "engine/attention/backends/cpu_backend.py",
    _PACKAGE / "cpu/replay/graph_replay.py",
)


def start(options: config.Engine, model_dir: Path) -> Callable[[], None]:
    """Start ``fill_cache`` in a thread; return a function that waits, and raises what it raised."""
    errors: list[BaseException] = []

    def fill() -> None:
        try:
            fill_cache(options, model_dir)
        except BaseException as error:
            errors.append(error)

    # A daemon: a load that fails meanwhile ends the process, and with it the compilers.
    thread = threading.Thread(target=fill, name="kernel compilation", daemon=True)
    thread.start()

    def wait() -> None:
        thread.join()
        if errors:
            raise errors[0]

    return wait


def fill_cache(options: config.Engine, model_dir: Path, stream: IO[str] | None = None) -> None:
    """Compile what an engine needs for a model, once per machine. ``stream``: shows progress."""
    if options.attention.backend != "fused" or options.attention.device is not config.Device.cpu:
        return
    if options.kv.layout is not config.KVLayout.paged or ":" in options.attention.resolver:
        return
    from labkit.cpu.runtime import kernel_cache

    kernel_cache.install()
    arguments = json.dumps(
        {
            "attention": to_plain(options.attention),
            "dtype": dtype_resolution.kv_dtype(options, "float32"),
            "replay": options.graph_replay,
            "activations": options.activations.value,
            "formats": _formats(options, model_dir),
        }
    )
    marker, stream = _marker(arguments), sys.stderr if stream is None else stream
    if marker.exists():
        return
    lock_file = marker.with_suffix(".lock")
    with cache_entries.one_line_errors(marker):
        marker.parent.mkdir(parents=True, exist_ok=True)
        lock_file.touch()
    with lock_file.open("a", encoding="utf-8") as lock:  # two processes do not compile the same
        waiting = "waiting for another process that compiles the kernels"
        cache_entries.wait_for_lock(lock, lambda: print(waiting, file=stream, flush=True))
        if not marker.exists() and _compile(arguments, stream):
            marker.touch()


def _formats(options: config.Engine, model_dir: Path) -> list[tuple[str, int, int]]:
    """Return the formats of the model's matrices in memory, as ``matrix_formats`` does."""
    storage = dtype_resolution.matrix_storage(options)
    stored = safetensors_header.matrix_formats(model_dir)
    if storage is not dtype_resolution.MatrixStorage.as_stored:
        stored = {("float32", 0, 0)}
    return sorted(stored)


def _marker(arguments: str) -> Path:
    """Return the file that says that the kernels of these sources are compiled for this CPU."""
    import llvmlite.binding as llvm
    import numba

    parts = (
        *(source_dependency_digest.digest(file, _PACKAGE) for file in SOURCES),
        numba.__version__,
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        arguments,
    )
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Path(numba.config.CACHE_DIR) / f"compiled-{name}"


def _compile(arguments: str, stream: IO[str]) -> bool:
    """Run the processes, and return whether all succeeded. They take steps from a common pipe."""
    import numba

    steps = steps_for(json.loads(arguments))
    queue, writer = os.pipe()
    os.write(writer, bytes(range(len(steps))))
    os.close(writer)
    done, reports = os.pipe()  # a byte for each kernel that is compiled
    os.set_blocking(done, False)
    command = [sys.executable, "-m", __name__, arguments, str(queue), str(os.getpid())]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(numba.config.CACHE_DIR)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    compilers = [
        subprocess.Popen(command, stdout=reports, pass_fds=(queue,), env=environment)
        for _ in range(PROCESSES)
    ]
    os.close(queue)
    os.close(reports)
    try:
        with _Progress(stream, sum(kernels for kernels, _ in steps)) as progress:
            while any(compiler.poll() is None for compiler in compilers):
                with contextlib.suppress(BlockingIOError):
                    progress.add(len(os.read(done, 1 << 10)))
                time.sleep(POLL_S)
    finally:
        for compiler in compilers:
            compiler.kill()
            compiler.wait()
        os.close(done)
    return all(compiler.returncode == 0 for compiler in compilers)


class _Progress:
    """Says ``compiling 5 of 17 kernels``: a live line on a terminal, one line elsewhere."""

    def __init__(self, stream: IO[str], total: int) -> None:
        self._stream, self._total, self._shown = stream, total, False
        self._live: Any = None
        self._start, self._done = time.monotonic(), 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, kernels: int) -> None:
        self._done += kernels
        if time.monotonic() - self._start < SHOW_AFTER_S:
            return
        line = f"compiling {min(self._done + 1, self._total)} of {self._total} kernels"
        if not self._stream.isatty():
            if not self._shown:
                print(f"{line} (once per machine)", file=self._stream, flush=True)
            self._shown = True
        elif self._live is None:
            from rich.console import Console
            from rich.status import Status

            self._live = Status(line, console=Console(file=self._stream))
            self._live.start()
        else:
            self._live.update(line)


Needs = dict[str, Any]  # what ``fill_cache`` passes to the processes
Step = Callable[[Needs], object]


def _kernel(module: str, name: str, needs: Needs) -> None:
    """Compile a kernel with one signature."""
    getattr(importlib.import_module(module), name).precompile()


def _pool(needs: Needs) -> None:
    from labkit.cpu.runtime import thread_pool

    thread_pool.install()


def _unit(op: str, needs: Needs) -> None:
    """Compile the function for the units of an operation of a graph."""
    from labkit.cpu.capture import graph_ops
    from labkit.cpu.replay import graph_op_kernels

    graph_op_kernels.unit_address(getattr(graph_ops, op))


def _format(element: str, bits: int, needs: Needs) -> None:
    """Compile the functions of a format of weights whose mantissas convert exactly, as trained."""
    from labkit.cpu.matmul import quantized_matmul

    quantized_matmul.format_functions(element, bits, bits > 0 and element != "float32")


def _int8_format(element: str, bits: int, group_size: int, needs: Needs) -> None:
    from labkit.cpu.matmul import int8_matmul

    int8_matmul.int8_functions(element, bits, group_size)


def _attention_body(module: str, needs: Needs) -> None:
    """Compile the arithmetic of an attention kernel."""
    from labkit.cpu.precision.kv_dtypes import POOL_DTYPES

    skip = from_plain(config.Attention, needs["attention"]).window_skip
    importlib.import_module(module).body(POOL_DTYPES[needs["dtype"]], skip)


def _plan(needs: Needs, tokens: int) -> tuple[Any, Any]:
    """Return a backend with one layer, and the metadata of a step of one sequence."""
    import numpy as np

    from labkit.engine import attention
    from labkit.engine.attention.kv_and_state_shapes import KVShape

    backend = attention.create_from_config(from_plain(config.Attention, needs["attention"]))
    backend.allocate((KVShape(1, 64, 64),), 1, 16, needs["dtype"])
    backend.bind(0, scale=1.0, heads=1)
    metadata = backend.plan(
        block_tables=np.zeros((1, 1), np.int32),
        seq_lens=np.array([tokens], np.int32),
        cu_seqlens_q=np.array([0, tokens], np.int32),
    )
    return backend, metadata


def _launch(tokens: int, needs: Needs) -> None:
    """Launch the kernel for a step of so many tokens."""
    import numpy as np

    backend, metadata = _plan(needs, tokens)
    new = np.zeros((tokens, 1, 64), np.float32)
    backend.forward(0, new, new, new, metadata)


def _replay(needs: Needs) -> None:
    import numba
    import numpy as np

    from labkit.cpu.replay import graph_replay
    from labkit.cpu.replay.graph_attention_structs import AttentionInputs

    _, metadata = _plan(needs, 1)
    attention = AttentionInputs(
        0, 0, 0, 0, 0, np.zeros((1, 1), np.uint8), np.zeros((1, 2, 8), np.int64),
        metadata.block_tables, 16, metadata.cu_seqlens_q, metadata.seq_lens,
    )  # fmt: skip
    arguments = 0, np.zeros(1, np.int32), np.zeros((1, 1), np.float32), metadata.lookup, attention
    kernel: Any = graph_replay.replay
    kernel.compile(tuple(map(numba.typeof, arguments)))


def steps_for(needs: Needs) -> list[tuple[int, Step]]:
    """Return the steps with their numbers of kernels, the longest first.

    A step that loads the kernels of another comes later.
    """
    low = [form for form in needs["formats"] if form[1] or form[0] != "float32"]
    by_int8 = [form for form in low if needs["activations"] == "int8" and form[1] in (4, 8)]
    steps: list[tuple[int, Step]] = [
        (5, _pool),
        (1, partial(_attention_body, "labkit.cpu.attention.decode_attention_kernel")),
        (1, partial(_attention_body, "labkit.cpu.attention.tiled_attention_kernel")),
    ]
    if needs["replay"]:
        steps.append((1, partial(_unit, "ADD")))
    if low:
        steps.append((1, partial(_unit, "LOW_PRECISION_MATMUL")))
    if len(low) < len(needs["formats"]):
        steps.append((1, partial(_unit, "MATMUL")))
        steps.append((1, partial(_kernel, "labkit.cpu.matmul.gemm", "pack_panels")))
    if by_int8:
        steps.append((1, partial(_unit, "INT8_MATMUL")))
    by_format = dict.fromkeys((element, bits) for element, bits, _ in low)
    steps += [(5, partial(_format, *form)) for form in by_format]
    steps += [(4, partial(_int8_format, *form)) for form in by_int8]
    steps += [
        (1, partial(_kernel, "labkit.cpu.layers.rope", "_rope")),
        (1, partial(_kernel, "labkit.cpu.matmul.matmul_launch", "launch")),
        (1, partial(_kernel, "labkit.cpu.layers.activations", "_activate")),
        (1, partial(_kernel, "labkit.cpu.layers.norms", "_rms_norm")),
        (2, partial(_launch, 1)),
        (1, partial(_launch, 8)),
    ]
    return [*steps, (1, _replay)] if needs["replay"] else steps


def main(needs: Needs, queue: int) -> None:
    """Take steps from the pipe until it is empty. Write a byte for each kernel that is done."""
    steps = steps_for(needs)
    while number := os.read(queue, 1):
        kernels, step = steps[number[0]]
        step(needs)
        os.write(1, b"." * kernels)


if __name__ == "__main__":
    gc.disable()  # a process of some seconds; collections would take a tenth of them
    parent_death.watch_parent(int(sys.argv[3]), None, started_by_main_thread=False)
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # without the teardown of LLVM
