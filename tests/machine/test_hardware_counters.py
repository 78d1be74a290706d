"""Hardware counters count this process's threads, or say in a line why there are none."""

import pytest

from labkit.machine.facts import hardware_counters
from labkit.machine.facts.hardware_counters import (
    SOFTWARE,
    HardwareCounters,
    NoHardwareCounters,
)

CLOCK = {"task_clock": (SOFTWARE, 1)}  # ns of CPU time, which every Linux counts


def test_counts_grow_with_the_work():
    try:
        counters = HardwareCounters({**CLOCK, "missing": (99, 99)})
    except NoHardwareCounters as error:
        pytest.skip(str(error))
    before = counters.read()
    sum(range(20_000))
    after = counters.read()
    counters.close()
    assert before.keys() == after.keys() == CLOCK.keys()
    assert after["task_clock"] > before["task_clock"] >= 0
    assert counters.read() == {}


@pytest.mark.parametrize(
    ("system", "events", "reason"),
    [("Darwin", CLOCK, "no perf_event_open on Darwin"), ("Linux", {}, "perf_event_open: ")],
)
def test_a_machine_without_counters_says_so(monkeypatch, system, events, reason):
    monkeypatch.setattr(hardware_counters.platform, "system", lambda: system)
    monkeypatch.setattr(hardware_counters.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hardware_counters.os, "listdir", lambda path: ["1"])
    with pytest.raises(NoHardwareCounters, match=f"^{reason}"):
        HardwareCounters(events)
