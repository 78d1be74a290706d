"""A tree of processes that appear, end and are adopted while it is stopped."""

import os
import signal

import psutil
import pytest

from labkit.machine.processes import process_tree
from labkit.machine.processes.process_tree import ProcessTree


class Processes:
    """Children by parent; what a signal reaches, and processes that a signal comes too late for."""

    def __init__(self, children):
        self.children, self.ended, self.sent, self.late = children, set(), [], {}

    def process(self, pid):
        if pid in self.ended:
            raise psutil.NoSuchProcess(pid)
        return Process(self, pid)

    def descendants(self, pid):
        for child in [] if pid in self.ended else self.children.get(pid, []):
            yield child
            yield from self.descendants(child)


class Process:
    def __init__(self, processes, pid):
        self.processes, self.pid = processes, pid

    def is_running(self):
        return self.pid not in self.processes.ended

    def send_signal(self, number):
        if not self.is_running():
            raise psutil.NoSuchProcess(self.pid)
        self.processes.sent.append((self.pid, number))
        for parent, child in self.processes.late.pop(self.pid, {}).items():
            self.processes.children.setdefault(parent, []).append(child)


@pytest.fixture
def processes(monkeypatch):
    made = Processes({1: [2, 3], 2: [4]})
    monkeypatch.setattr(process_tree.psutil, "Process", made.process)
    monkeypatch.setattr(process_tree, "_descendants", made.descendants)
    monkeypatch.setattr(os, "killpg", lambda group, number: made.sent.append((-group, number)))
    return made


def test_stopping_reaches_what_starts_before_it_stops(processes):
    processes.late = {2: {2: 5}, 5: {5: 6}}  # 2 starts 5 as it is stopped, 5 starts 6
    tree = ProcessTree(1, whole_group=True)
    assert tree.pids == [1]
    assert tree.stop() == [2, 4, 3, 5, 6]
    stopped = [pid for pid, number in processes.sent if number is signal.SIGSTOP]
    assert stopped == [-1, 1, 2, 4, 3, 5, 6] and tree.pids == [1, 2, 4, 3, 5, 6]
    assert tree.stop_new() == []


def test_an_adopted_descendant_stays_and_an_ended_one_is_forgotten(processes):
    tree = ProcessTree(1, whole_group=False)
    assert tree.search() == [2, 4, 3] and tree.search() == []
    processes.ended.add(2)
    processes.children[4] = [8]
    processes.children[1] = [3]
    assert tree.search() == [8] and sorted(tree.pids) == [1, 3, 4, 8]
    tree.resume()
    assert {pid for pid, _ in processes.sent} == {1, 3, 4, 8}  # and no group
    assert {number for _, number in processes.sent} == {signal.SIGCONT}
    processes.sent.clear()
    tree.kill()
    kinds = [signal.SIGSTOP, signal.SIGKILL]
    assert [n for pid, n in processes.sent if pid == 8] == kinds


def test_a_process_that_has_ended_has_no_tree(processes):
    processes.ended.add(1)
    tree = ProcessTree(1, whole_group=False)
    assert tree.stop() == [] and processes.sent == []
