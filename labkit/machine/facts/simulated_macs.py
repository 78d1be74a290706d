"""Simulated Macs, whose memory budgets can be compared on any computer.

A simulated Mac consists of three numbers (total, available, working set); the run itself still uses
this computer. The working set is the size that Metal reports on such a Mac at the default limit:
two thirds of RAM up to 32 GiB, three quarters from 36 GiB. Logs of Macs show this for 16 GiB
(10922.67 MiB), 32 GiB (21845.34 MiB), 64 GiB (49152 MiB) and 96 GiB (73728 MiB); a newer Mac with
128 GiB under macOS 26 reported 107.52 GiB. Available memory is assumed: macOS and a desktop's
programs use a quarter of RAM, but at least 3 GiB and at most 12 GiB.
"""

from __future__ import annotations

from labkit.machine.facts import memory_capacity
from labkit.machine.facts.macos import WiredSettings
from labkit.machine.facts.memory_capacity import GIB, MIB, MemoryProfile

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
    return memory_capacity.this_machine() if name is None else simulated_mac(name)


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
