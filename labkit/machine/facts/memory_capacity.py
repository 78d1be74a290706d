"""Memory sizes of a machine for memory budgets: this computer, or a simulated Mac.

A simulated Mac consists of three numbers (total, available, working set), so that budgets can be
compared on any computer; the run itself still uses this computer. The working set is the size that
Metal reports on such a Mac at the default limit: two thirds of RAM up to 32 GiB, three quarters
from 36 GiB. Logs of Macs show this for 16 GiB (10922.67 MiB), 32 GiB (21845.34 MiB), 64 GiB (49152
MiB) and 96 GiB (73728 MiB); a newer Mac with 128 GiB under macOS 26 reported 107.52 GiB. Available
memory is assumed: macOS and a desktop's programs use a quarter of RAM, but at least 3 GiB and at
most 12 GiB.
"""

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


# By name: (RAM in GiB, Metal's working set in MiB). None: 2/3 of RAM up to 32 GiB, else 3/4.
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
    """Return the profile of the simulated Mac ``name``, or of this computer if ``name`` is None.

    Raises ``KeyError`` if there is no simulated Mac of that name.
    """
    return this_machine() if name is None else simulated_mac(name)


def simulated_mac(name: str) -> MemoryProfile:
    """Return the profile of a simulated Mac at macOS's default limits."""
    ram_gib, working_set_mib = SIMULATED_MACS[name]
    total = ram_gib * GIB
    default = total * 2 // 3 if ram_gib <= 32 else total * 3 // 4
    return MemoryProfile(
        name=name,
        total=total,
        available=total - max(3 * GIB, min(total // 4, 12 * GIB)),
        working_set=default if working_set_mib is None else working_set_mib * MIB,
        metal=True,
        wired=WiredSettings(limit_mb=0, collector=True, dynamic_lwm=True),
    )


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
