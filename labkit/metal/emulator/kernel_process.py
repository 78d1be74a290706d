"""Runs a compiled kernel in a process of its own, under one or several schedules."""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from labkit.metal.emulator.emulator_errors import KernelFault
from labkit.metal.emulator.source_capture import Traced

RANDOM_FILL = 256  # garbage bytes drawn from the seed


class Order(IntEnum):
    """In which order lanes, simdgroups and threadgroups take their turns."""

    forward = 0
    reverse = 1
    random = 2


@dataclass(frozen=True)
class Schedule:
    """One run: an order, what uninitialised memory holds, and the seed of both.

    ``fill`` is a byte (0 to 255), repeated, or ``RANDOM_FILL``.
    """

    order: Order
    fill: int
    seed: int


# 0xFF is NaN as a float and -1 as an integer; 0x3C is small and harmless in every type.
THREE = (
    Schedule(Order.forward, 0xFF, 1),
    Schedule(Order.reverse, 0x3C, 2),
    Schedule(Order.random, RANDOM_FILL, 3),
)
# A launch in use runs once: random order, and NaN wherever nothing was written.
ONE = (Schedule(Order.random, 0xFF, 1),)


def run(
    program: Path,
    traced: Traced,
    inputs: list[bytes | None],
    sizes: list[int],
    schedules: tuple[Schedule, ...],
    *,
    cpu_seconds: float,
) -> list[list[bytes]]:
    """Return the outputs' bytes, one list per schedule.

    Parameters
    ----------
    program
        From ``build``.
    traced
        Its launch.
    inputs
        A buffer's bytes by position; None for outputs.
    sizes
        A buffer's bytes, counted, by position.
    cpu_seconds
        Processor time that a run may take.

    Raises
    ------
    KernelFault
        What the kernel did wrong.
    """
    job = [struct.pack("<6Id", *traced.grid, *traced.threadgroup, cpu_seconds)]
    job.append(struct.pack("<I", len(schedules)))
    job += [struct.pack("<IIQ", s.order, s.fill, s.seed) for s in schedules]
    for data, size in zip(inputs, sizes, strict=True):
        job.append(struct.pack("<Q", size))
        job.append(data or b"")
    done = subprocess.run(
        [str(program)],
        input=b"".join(job),
        capture_output=True,
        check=False,
        env={
            "UBSAN_OPTIONS": "symbolize=0:print_stacktrace=0",
            "TSAN_OPTIONS": "halt_on_error=1",
        },
    )
    if done.returncode or done.stderr:
        raise _fault(done.returncode, done.stderr.decode(errors="replace"))
    return _split(done.stdout, [s for d, s in zip(inputs, sizes, strict=True) if d is None])


def _split(data: bytes, sizes: list[int]) -> list[list[bytes]]:
    runs, at = [], 0
    while at < len(data):
        outputs = []
        for size in sizes:
            outputs.append(data[at : at + size])
            at += size
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
