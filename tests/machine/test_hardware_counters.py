"""Hardware counters count this process's threads, or say in a line why there are none."""

import pytest

from labkit.machine.facts import hardware_counters
from labkit.machine.facts.hardware_counters import EVENTS, SOFTWARE, count

CLOCK = {"task_clock": (SOFTWARE, 1)}  # ns of CPU time, which every Linux counts


@pytest.fixture(autouse=True)
def permitted(monkeypatch):
    monkeypatch.setattr(hardware_counters, "SYSCALL_NUMBERS", {"x86_64": 298, "aarch64": 241})


def test_more_work_counts_more_and_what_is_missing_is_left_out():
    events = {**CLOCK, "missing": (99, 99)}
    try:
        count(lambda: None, events)
    except OSError as error:
        pytest.skip(str(error))
    # The least of several: other threads of this process count too.
    little, much = (
        min((count(work, events) for _ in range(5)), key=lambda counts: counts["task_clock"])
        for work in (lambda: None, lambda: sum(range(200_000)))
    )
    assert little.keys() == much.keys() == CLOCK.keys()
    assert much["task_clock"] > little["task_clock"] >= 0


@pytest.mark.parametrize(
    ("system", "reason"), [("Darwin", "no perf_event_open on Darwin"), ("Linux", "not permitted")]
)
def test_a_machine_without_counters_says_so(monkeypatch, system, reason):
    def refused(*_arguments):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(hardware_counters.platform, "system", lambda: system)
    monkeypatch.setattr(hardware_counters, "_open", refused)
    monkeypatch.setattr(hardware_counters.os, "listdir", lambda path: ["1"])
    monkeypatch.setattr(hardware_counters.platform, "machine", lambda: "x86_64")
    with pytest.raises(OSError, match=reason):
        count(lambda: pytest.fail("it counts nothing"), EVENTS)


def test_an_event_that_one_thread_lacks_leaves_no_file_open(monkeypatch):
    closed = []

    def open_first(_number, _event, thread):
        if thread == 2:
            raise OSError(3, "no such thread")
        return 1000 + thread

    monkeypatch.setattr(hardware_counters, "_open", open_first)
    monkeypatch.setattr(hardware_counters.os, "listdir", lambda path: ["1", "2"])
    monkeypatch.setattr(hardware_counters.os, "close", closed.append)
    monkeypatch.setattr(hardware_counters.platform, "system", lambda: "Linux")
    monkeypatch.setattr(hardware_counters.platform, "machine", lambda: "x86_64")
    with pytest.raises(OSError, match="no such thread"):
        count(lambda: pytest.fail("it counts nothing"), CLOCK)
    assert closed == [1001]
