"""The machine as a memory budget sees it: this one, or a Mac simulated anywhere.

A simulated Mac is three numbers, so that budgets can be compared on any computer; what
runs still runs here. Its working set is what Metal reports on such a Mac at the system's
default limit: two thirds of RAM up to 32 GiB and three quarters from 36 GiB, as logged
for 16 GiB (10922.67 MiB), 32 GiB (21845.34 MiB), 64 GiB (49152 MiB) and 96 GiB
(73728 MiB); one newer Mac of 128 GiB under macOS 26 was logged with 107.52 GiB. What is free is an
assumption, the same for all: macOS and a desktop's programs hold a quarter of RAM, at
least 3 GiB and at most 12.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from labkit.machine import cgroups, macos
from labkit.machine.macos import WiredSettings
from labkit.machine.operating_system import operating_system

GIB = 1 << 30
MIB = 1 << 20
THIS_MACHINE = "this machine"
# Free memory moves between a plan and a run; advice keeps so much of RAM away from it.
SLACK_FRACTION = 1 / 50


@dataclass(frozen=True)
class MemoryProfile:
    """Memory in bytes.

    Parameters
    ----------
    name
        ``this machine``, or a simulated one's name.
    total
        RAM, or the container's limit where that is smaller.
    available
        What is free now.
    hint
        Metal's recommended working set; without Metal ``total``, as a CPU engine has
        nothing else to go by.
    metal
        Whether ``working_set`` is Metal's.
    slack
        What ``available`` may move by between a plan and a run; 0 where it is simulated.
    wired
        The wired collector and its limit; None where there is none to read.
    """

    name: str
    total: int
    available: int
    working_set: int
    metal: bool
    slack: int = 0
    wired: WiredSettings | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has."""
        if not (0 <= self.available <= self.total and 0 < self.working_set <= self.total):
            raise ValueError(
                f"{self.name}: {self.total} bytes of memory, {self.available} available and a "
                f"hint of {self.working_set} are no machine"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether these are a table's numbers, not this computer's."""
        return self.name != THIS_MACHINE


# name: RAM (GiB), Metal's working set (MiB; None: two thirds up to 32 GiB, else three quarters)
SIMULATED_MACS: dict[str, tuple[int, int | None]] = {
    "sim_m1_8gb": (8, None),
    "sim_m1_pro_16gb": (16, None),
    "sim_m2_24gb": (24, None),
    "sim_m1_pro_32gb": (32, None),
    "sim_m3_pro_36gb": (36, None),
    "sim_m4_pro_48gb": (48, None),
    "sim_m1_max_64gb": (64, None),
    "sim_m2_max_96gb": (96, None),
    "sim_m4_max_128gb": (128, None),
    "sim_m5_max_128gb": (128, 110100),
    "sim_m2_ultra_192gb": (192, None),
    "sim_m3_ultra_512gb": (512, None),
}


def find_profile(name: str | None) -> MemoryProfile:
    """Return the simulated machine ``name``, or this one for None.

    Raises
    ------
    KeyError
        There is no such simulated machine.
    """
    return this_machine() if name is None else simulated_mac(name)


def simulated_mac(name: str) -> MemoryProfile:
    """Return a simulated Mac at the system's default limits."""
    size, hint_mib = SIMULATED_MACS[name]
    total = size * GIB
    share = total * 2 // 3 if size <= 32 else total * 3 // 4
    return MemoryProfile(
        name=name,
        total=total,
        available=total - max(3 * GIB, min(total // 4, 12 * GIB)),
        working_set=share if hint_mib is None else hint_mib * MIB,
        metal=True,
        wired=WiredSettings(limit_mb=0, collector=True, dynamic_lwm=True),
    )


def this_machine() -> MemoryProfile:
    """Read this computer: RAM or the container's limit, what is free, Metal's hint."""
    total, free = operating_system().memory()
    total = min(total, cgroups.memory_limit() or total)
    room, working_set = cgroups.memory_headroom(), macos.recommended_working_set()
    return MemoryProfile(
        name=THIS_MACHINE,
        total=total,
        available=min(total, free if room is None else min(free, room)),
        working_set=total if working_set is None else min(working_set, total),
        metal=working_set is not None,
        slack=int(total * SLACK_FRACTION),
        wired=macos.wired_settings() if sys.platform == "darwin" else None,
    )


def trim_heap() -> None:
    """Return freed memory to the system, where the C library keeps it (glibc's does).

    It keeps what was freed below memory that is still in use: arrays of up to 32 MB, once one
    of that size has been freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
