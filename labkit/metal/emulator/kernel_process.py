"""Run a compiled kernel in a process of its own, under one or several schedules."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from labkit.metal.emulator.emulator_errors import EmulatorUnavailable, KernelFault
from labkit.metal.emulator.source_capture import CapturedKernel

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

    Parameters
    ----------
    program
        The program that ``compile_kernel`` returned.
    captured
        The captured kernel, for the sizes of grid and threadgroup.
    inputs
        The content of each buffer, by position. None for an output.
    sizes
        The size of each buffer in bytes, by position.
    schedules
        The orders of fibers, each with the memory's contents, in which the kernel runs once.
    cpu_seconds
        Maximum CPU seconds of a run.

    Raises
    ------
    KernelFault
        The kernel did something that Metal does not allow.
    EmulatorUnavailable
        The operating system does not let programs in the cache folder run.
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
    runs, offset = [], 0
    while offset < len(data):
        outputs = []
        for size in sizes:
            outputs.append(data[offset : offset + size])
            offset += size
        runs.append(outputs)
    return runs


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
