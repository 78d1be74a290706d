"""Emulate a kernel call: capture its source, translate and compile it, and run it in a process."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.metal.emulator import EmulatorUnavailable, KernelFault
from labkit.metal.emulator.cpp_compilation import BuildKind, compile_kernel
from labkit.metal.emulator.cpp_translation import Buffer, CapturedKernel, capture_kernel, translate
from labkit.metal.kernel_call import KernelCall

SEEDED_FILL = 256  # not a byte: fill with garbage drawn from the seed


class FiberOrder(IntEnum):
    """The order in which lanes, simdgroups and threadgroups run."""

    forward = 0
    reverse = 1
    random = 2


@dataclass(frozen=True)
class Schedule:
    """How a kernel is run once: the order of execution, and the content of uninitialised memory.

    ``fill`` is the byte (0 to 255) that fills the memory, or ``SEEDED_FILL`` for random bytes.
    ``seed`` is the seed of ``FiberOrder.random`` and of the random bytes.
    """

    order: FiberOrder
    fill: int
    seed: int


# 0xFF is NaN as a float and -1 as an integer; 0x3C is small and harmless in every type.
PROOF_SCHEDULES = (
    Schedule(FiberOrder.forward, 0xFF, 1),
    Schedule(FiberOrder.reverse, 0x3C, 2),
    Schedule(FiberOrder.random, SEEDED_FILL, 3),
)
# Outside tests a launch runs once, in random order, with NaN in uninitialised memory.
DEFAULT_SCHEDULES = (Schedule(FiberOrder.random, 0xFF, 1),)


@dataclass(frozen=True)
class Emulator:
    """Runs kernel calls on the CPU; an ``Executor`` like ``labkit.metal.kernel_call.on_metal``."""

    # The kernel runs once per schedule. The outputs of all runs must be equal bit for bit.
    schedules: tuple[Schedule, ...] = DEFAULT_SCHEDULES
    build_kind: BuildKind = BuildKind.use  # how kernels are compiled
    # Maximum CPU time of a run (seconds). A longer run counts as an endless loop.
    cpu_seconds: float = 600.0

    def __call__(self, call: KernelCall) -> list[mx.array]:
        """Return the outputs of ``call``.

        Raises ``EmulatorUnavailable`` if there is no compiler, this MLX cannot export kernels, or
        the cache folder lets no program run.
        Raises ``KernelFault`` if the kernel did something that Metal does not allow, or two
        schedules disagree.
        """
        mx.eval(call.operands())  # no graph reaches the processes that run the kernel
        captured = capture_kernel(call)
        translation = translate(captured)
        program = compile_kernel(translation, self.build_kind)
        inputs = [_input(call, buffer) for buffer in translation.buffers]
        written = iter([_size(shape, dtype) for _, shape, dtype in call.outputs])
        sizes = [next(written) if data is None else len(data) for data in inputs]
        runs = run_kernel(
            program, captured, inputs, sizes, self.schedules, cpu_seconds=self.cpu_seconds
        )
        for other in runs[1:]:
            _check_equal(call, runs[0], other)
        return [
            _from_bytes(data, shape, dtype)
            for data, (_, shape, dtype) in zip(runs[0], call.outputs, strict=True)
        ]


def _input(call: KernelCall, buffer: Buffer) -> bytes | None:
    """Return the input bytes bound to a buffer, or None if the buffer is an output."""
    if buffer.written:
        return None
    arrays = dict(call.inputs)
    if buffer.name in arrays:
        return _to_bytes(arrays[buffer.name])
    name, _, suffix = buffer.name.rpartition("_")
    if suffix == "shape" and name in arrays:
        return np.array(arrays[name].shape, np.int32).tobytes()
    raise KernelFault("compile", f"buffer {buffer.name} is not emulated")


def _to_bytes(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def _from_bytes(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    numpy_dtype: Any = np.uint16 if dtype == mx.bfloat16 else _NUMPY[dtype]
    array = mx.array(np.frombuffer(data, numpy_dtype).reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array


_NUMPY = {mx.float32: np.float32, mx.float16: np.float16, mx.uint32: np.uint32, mx.int32: np.int32}


def _size(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * int(dtype.size)


def _check_equal(call: KernelCall, first: list[bytes], other: list[bytes]) -> None:
    """Raise ``KernelFault`` with the first differing element if the outputs of two runs differ."""
    for (name, shape, dtype), a, b in zip(call.outputs, first, other, strict=True):
        if a != b:
            x, y = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
            element = int(np.flatnonzero(x != y)[0]) // dtype.size
            index = tuple(int(i) for i in np.unravel_index(element, shape))
            raise KernelFault(
                "disagree",
                f"{name}{list(index)} depends on the schedule or on uninitialised memory",
            )


def run_kernel(
    program: Path,
    captured: CapturedKernel,
    inputs: list[bytes | None],
    sizes: list[int],
    schedules: tuple[Schedule, ...],
    *,
    cpu_seconds: float,
) -> list[list[bytes]]:
    """Run a compiled kernel and return the bytes of its outputs, one list per schedule.

    ``program`` is that of ``compile_kernel``. ``inputs`` has the content of each buffer (None for
    an output), ``sizes`` its bytes. The kernel runs once per schedule, for at most ``cpu_seconds``.
    Raises ``KernelFault`` if the kernel did something that Metal does not allow, and
    ``EmulatorUnavailable`` if no program in the cache folder may run.
    """
    job = [struct.pack("<6Id", *captured.grid, *captured.threadgroup, cpu_seconds)]
    job.append(struct.pack("<I", len(schedules)))
    job += [struct.pack("<IIQ", s.order, s.fill, s.seed) for s in schedules]
    for data, size in zip(inputs, sizes, strict=True):
        job.append(struct.pack("<Q", size))
        job.append(data or b"")
    # Where compilers come from modules or conda, the program finds their libraries by this path.
    libraries = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    options = {"UBSAN_OPTIONS": "symbolize=0:print_stacktrace=0", "TSAN_OPTIONS": "halt_on_error=1"}
    try:
        completed = subprocess.run(
            [str(program)],
            input=b"".join(job),
            capture_output=True,
            check=False,
            env=libraries | options,
        )
    except PermissionError:
        raise EmulatorUnavailable(
            f"device=emulated: {program.parent} does not let programs run; set LABKIT_CACHE to a "
            "folder that does (not on a file system mounted noexec)"
        ) from None
    # Not by its messages: the loader of libraries may have warnings of its own.
    if completed.returncode:
        raise _fault(completed.returncode, completed.stderr.decode(errors="replace"))
    return _split(completed.stdout, [s for d, s in zip(inputs, sizes, strict=True) if d is None])


def _split(data: bytes, sizes: list[int]) -> list[list[bytes]]:
    ends = [0, *accumulate(sizes)]
    runs = range(0, len(data), max(1, ends[-1]))
    return [[data[run + a : run + b] for a, b in pairwise(ends)] for run in runs]


def _fault(code: int, text: str) -> KernelFault:
    for line in text.splitlines():
        if line.startswith("FAULT "):
            kind, _, detail = line.removeprefix("FAULT ").partition(": ")
            return KernelFault(kind, detail)
        if "runtime error:" in line:
            return KernelFault("undefined", line.strip())
    if "ThreadSanitizer: data race" in text:
        places = re.findall(r"kernel\.metal:\d+", text)
        return KernelFault(
            "race", f"{' and '.join(places[:2]) or 'two accesses'} without a barrier"
        )
    return KernelFault("crash", f"exit status {code}: {text.strip()[:200] or 'no message'}")
