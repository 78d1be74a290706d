"""Simulated Macs: their sizes, and the names in the schema."""

import pytest

from labkit import config
from labkit.machine.facts.memory_capacity import GIB, MIB
from labkit.machine.facts.simulated_macs import SIMULATED_MACS, find_profile


def test_the_schema_lists_the_simulated_machines():
    assert tuple(SIMULATED_MACS) == config.SIMULATED_MAC_NAMES


@pytest.mark.parametrize(
    ("name", "ram_gib", "working_set_mib", "free_gib"),
    [
        ("sim_m1_8gb", 8, 5461, 5),
        ("sim_m1_pro_16gb", 16, 10922, 12),
        ("sim_m1_pro_32gb", 32, 21845, 24),
        ("sim_m3_pro_36gb", 36, 27648, 27),
        ("sim_m1_max_64gb", 64, 49152, 52),
        ("sim_m2_max_96gb", 96, 73728, 84),
        ("sim_m5_max_128gb", 128, 110100, 116),
        ("sim_m3_ultra_512gb", 512, 393216, 500),
    ],
)
def test_simulated_machines(name, ram_gib, working_set_mib, free_gib):
    machine = find_profile(name)
    assert machine.total == ram_gib * GIB and machine.available == free_gib * GIB
    assert machine.working_set // MIB == working_set_mib
    assert machine.is_simulated and machine.metal and machine.slack == 0
