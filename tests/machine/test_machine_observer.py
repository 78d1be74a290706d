"""Samples of a machine with known times, and the cost of taking them."""

import json
import os
from types import SimpleNamespace

import pytest

from labkit.machine.facts import machine_observer
from labkit.machine.facts.machine_observer import MachineObserver


class System:
    """An operating system and the clock of this process, set by the test."""

    def __init__(self):
        self.now, self.own, self.busy, self.worker = 100.0, 5.0, 50.0, 0.0
        self.descendants = 30.0  # of earlier runs
        self.has_worker = True
        self.server = 900.0

    def monotonic(self):
        return self.now

    def process_time(self):
        return self.own

    def sample(self):
        return {"mhz": 2000.0}

    def busy_s(self):
        if self.busy is None:
            raise OSError("no /proc/stat")
        return self.busy

    def process_cpu_s(self, pid):
        if pid == os.getpid():
            return self.own + self.descendants
        return {7: self.worker, 8: self.server}[pid]

    def process_memory(self, pid):
        if not self.has_worker:
            raise OSError("it has ended")
        return {"rss_bytes": 64}


@pytest.fixture
def system(monkeypatch):
    system = System()
    monkeypatch.setattr(machine_observer, "operating_system", lambda: system)
    times = SimpleNamespace(monotonic=system.monotonic, process_time=system.process_time)
    monkeypatch.setattr(machine_observer, "time", times)
    return system


def test_foreign_cores_are_what_neither_the_worker_nor_this_process_used(system):
    observer = MachineObserver()
    for seconds, busy, worker, own in ((2.0, 5.0, 1.0, 0.5), (4.0, 1.0, 2.0, 0.0)):
        system.now += seconds
        system.busy += busy
        system.worker += worker
        system.own += own
        observer.sample(7)
    observer.sample(7)  # at the same moment
    system.now += 1.0
    system.busy, system.has_worker = None, False
    observer.sample(7)
    system.now, system.busy = system.now + 1.2345, 60.0
    observer.sample(7)  # since when, is not known
    report = observer.report()
    assert report["samples"] == {
        "t_s": [2.0, 6.0, 6.0, 7.0, 8.23],
        "mhz": [2000.0] * 5,
        "rss_bytes": [64] * 3 + [None] * 2,
        "foreign_cores": [1.75, 0.0, None, None, None],
    }
    assert (report["period_s"], report["cpu_s"]) == (1.0, 0.5)
    assert report["share"] == round(0.5 / 8.2345, 5)
    json.dumps(report, allow_nan=False)


def test_foreign_cores_beside_workers_that_take_turns(system):
    observer = MachineObserver()
    for seconds, busy, workers, own in ((2.0, 5.0, 1.0, 0.5), (4.0, 2.0, 0.6, 0.6)):
        system.now += seconds
        system.busy += busy
        system.descendants += workers
        system.own += own
        observer.sample(os.getpid())
    assert observer.report()["samples"]["foreign_cores"] == [1.75, 0.2]


@pytest.mark.parametrize("take_turns", [False, True])
def test_servers_that_labkit_did_not_start_are_no_foreign_load(system, take_turns):
    observer, unknown = MachineObserver([8]), MachineObserver(None)
    worker = os.getpid() if take_turns else 7
    for busy, server in ((5.0, 904.0), (5.0, 905.0)):
        system.now += 2.0
        system.busy, system.server = system.busy + busy, server
        observer.sample(worker)
        unknown.sample(worker)
    assert observer.report()["samples"]["foreign_cores"] == [0.5, 2.0]
    assert "foreign_cores" not in unknown.report()["samples"]


def test_cpu_time_that_is_lost_with_its_process_is_not_foreign(system):
    """On macOS only living processes are asked."""
    observer = MachineObserver([8])
    for system.now, system.busy, system.server in ((101.0, 51.0, 0.0), (102.0, 53.0, 0.5)):
        observer.sample(7)
    assert observer.report()["samples"]["foreign_cores"] == [None, 1.5]


def test_an_hour_is_sampled_and_no_more(system):
    observer = MachineObserver()
    assert observer.report()["share"] == 0.0  # no time has passed
    for _ in range(3602):
        observer.sample(7)
    assert len(observer.report()["samples"]["t_s"]) == 3600
