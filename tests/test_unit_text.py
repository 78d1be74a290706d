"""Numbers with units in overrides."""

import pytest

from labkit.config.unit_text import in_units_of_option


@pytest.mark.parametrize(
    ("override", "converted"),
    [
        ("engine.memory_limit=1GiB", "engine.memory_limit=1073741824"),
        ("engine.memory_limit=1.5GiB", "engine.memory_limit=1610612736"),
        ("engine.memory_limit=1TiB", "engine.memory_limit=1099511627776"),
        ("engine.memory_limit=1.001TB", "engine.memory_limit=1001000000000"),
        ("engine.memory_limit='64MiB'", "engine.memory_limit=67108864"),
        ("engine.budget.bytes=512MiB,1GB", "engine.budget.bytes=536870912,1000000000"),
        ("design.time=90s,10m", "design.time=90,600"),
        ("design.time=2min", "design.time=120"),
        ("design.timeout_s=1.5h", "design.timeout_s=5400"),
        ("design.time=10M", "design.time=10M"),
        ("design.time=120", "design.time=120"),
        ("engine.memory_limit=null", "engine.memory_limit=null"),
        ("engine.memory_limit=1GiBi", "engine.memory_limit=1GiBi"),
        ("workload.name=1GiB", "workload.name=1GiB"),
        ("ablation=seq_map", "ablation=seq_map"),
        ("~ablation.arms.x", "~ablation.arms.x"),
    ],
)
def test_numbers_are_converted_to_the_unit_of_their_option(override, converted):
    assert in_units_of_option(override) == converted
