"""A machine's memory sizes, for memory budgets, and the return of freed heap memory."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from labkit.machine.facts import cgroups, macos
from labkit.machine.facts.macos import WiredSettings
from labkit.machine.facts.operating_system_protocol import operating_system

GIB = 1 << 30
MIB = 1 << 20
THIS_MACHINE = "this machine"
# Available memory changes between plan and run, so advice leaves this fraction of RAM as a margin.
SLACK_FRACTION = 1 / 50


@dataclass(frozen=True)
class MemoryProfile:
    """A machine's memory in bytes."""

    name: str  # ``this machine``, or the name of a simulated Mac
    total: int  # RAM, or the container's limit where that is smaller
    available: int  # memory that is free now
    working_set: int  # metal's recommended working set; without Metal, ``total``
    metal: bool  # whether ``working_set`` is Metal's
    # Bytes by which ``available`` may change between plan and run; 0 for a simulated Mac.
    slack: int = 0
    wired: WiredSettings | None = None  # the settings of wired memory; None outside macOS

    def __post_init__(self) -> None:
        if not (0 <= self.available <= self.total and 0 < self.working_set <= self.total):
            raise ValueError(
                f"{self.name}: {self.available} available bytes and a working set of "
                f"{self.working_set} must each fit into {self.total} bytes of memory"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether this is a simulated Mac and not this computer."""
        return self.name != THIS_MACHINE


def this_machine() -> MemoryProfile:
    """Return this computer's current memory profile, within the container's limits."""
    total, available = operating_system().memory()
    total = min(total, cgroups.memory_limit() or total)
    headroom, working_set = cgroups.memory_headroom(), macos.recommended_working_set()
    return MemoryProfile(
        name=THIS_MACHINE,
        total=total,
        available=min(total, available if headroom is None else min(available, headroom)),
        working_set=total if working_set is None else min(working_set, total),
        metal=working_set is not None,
        slack=int(total * SLACK_FRACTION),
        wired=macos.wired_settings() if sys.platform == "darwin" else None,
    )


def trim_heap() -> None:
    """Return freed heap memory to the system with ``malloc_trim``. Without glibc, do nothing.

    glibc keeps freed memory that lies below an allocation still in use. Once an array of up to
    32 MB has been freed, glibc also allocates further arrays of that size on the heap.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))
