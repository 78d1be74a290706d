"""Sizes in overrides."""

import pytest

from labkit.config.size_text import sizes_in_bytes


@pytest.mark.parametrize(
    ("override", "in_bytes"),
    [
        ("engine.memory_limit=1GiB", "engine.memory_limit=1073741824"),
        ("engine.memory_limit=1.5GiB", "engine.memory_limit=1610612736"),
        ("engine.memory_limit='64MiB'", "engine.memory_limit=67108864"),
        ("engine.budget.bytes=512MiB,1GB", "engine.budget.bytes=536870912,1000000000"),
        ("engine.memory_limit=null", "engine.memory_limit=null"),
        ("engine.memory_limit=1GiBi", "engine.memory_limit=1GiBi"),
        ("workload.name=1GiB", "workload.name=1GiB"),
        ("ablation=seq_map", "ablation=seq_map"),
        ("~ablation.arms.x", "~ablation.arms.x"),
    ],
)
def test_sizes_of_options_in_bytes_become_numbers(override, in_bytes):
    assert sizes_in_bytes(override) == in_bytes
