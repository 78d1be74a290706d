"""Busy threads of processes that take turns run on the same cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from labkit.machine.processes import same_core_pinning
from labkit.machine.processes.same_core_pinning import ThreadPlacement

CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs Linux and two cores")

# Two threads that hash without the interpreter lock, one that sleeps, and one that begins later.
CODE = """
import hashlib, os, sys, threading, time
data = bytes(1 << 22)
def busy():
    while True:
        hashlib.sha256(data).digest()
if sys.argv[1:] == ["restricted"]:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
threads = [threading.Thread(target=target, daemon=True, args=args)
           for target, args in ((busy, ()), (time.sleep, (99,)))]
for thread in threads:
    thread.start()
print(threads[0].native_id, threads[1].native_id, flush=True)
busy()
"""


@pytest.fixture
def start():
    """Start a process, and return it with the ids of its main, its busy and its idle thread."""
    processes = []

    def begin(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, *arguments], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process.pid, *map(int, process.stdout.readline().split())

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def masks(threads):
    return [os.sched_getaffinity(thread) for thread in threads]


def placed(placement, arm, threads, *gone):
    """Place the threads of a process as soon as both busy ones have worked about equally long."""
    pid, *_ = threads
    placement.place(arm, [*gone, pid])
    before, used = [same_core_pinning._cpu_ns(thread) for thread in threads[:2]], [0, 1]
    while min(used) < max(20_000_000, 0.5 * max(used)):
        time.sleep(0.01)
        now = [same_core_pinning._cpu_ns(thread) for thread in threads[:2]]
        used = [ns - start for ns, start in zip(now, before, strict=True)]
    placement.place(arm, [*gone, pid])


def test_the_busy_threads_of_all_arms_have_the_same_cores_and_the_others_have_all(start):
    placement, arms = ThreadPlacement(), [start() for _ in range(3)]
    for arm, threads in enumerate(arms):
        placed(placement, arm, threads)
    first, second, idle = masks(arms[0])
    assert len(first) == len(second) == 1 and first != second and idle == set(CORES)
    assert masks(arms[1]) == masks(arms[2]) == [first, second, idle]
    for arm, (pid, *_) in enumerate(arms):
        placement.release(arm, [pid])
        assert masks(arms[arm]) == [set(CORES)] * 3


def test_a_thread_with_a_mask_of_its_own_keeps_it(start):
    placement, threads = ThreadPlacement(), start("restricted")
    placed(placement, 0, threads)
    assert masks(threads) == [{CORES[-1]}] * 3
    placement.release(0, [threads[0]])
    assert masks(threads) == [{CORES[-1]}] * 3


def test_a_thread_that_inherits_a_core_from_its_creator_may_run_on_all(start):
    placement, threads = ThreadPlacement(), start()
    placed(placement, 0, threads)
    os.sched_setaffinity(threads[2], {CORES[0]})  # as if a placed thread had started it
    placement.place(0, [threads[0]])
    assert masks(threads)[2] == set(CORES)


def test_a_mask_of_its_own_is_kept_although_other_arms_have_the_same_core(start):
    placement, threads = ThreadPlacement(), start("restricted")
    placed(placement, 0, threads)
    other = start()
    placed(placement, 1, other)  # gets both cores
    placement.place(0, [threads[0]])
    assert masks(threads) == [{CORES[-1]}] * 3


def test_the_busiest_are_ranked_by_time_and_ordered_by_creation():
    used = {9: 500, 3: 400, 5: 90, 7: 130, 8: 0}
    assert same_core_pinning._busiest(used, 2) == [3, 9]
    assert same_core_pinning._busiest(used, 8) == [3, 7, 9]
    assert same_core_pinning._busiest({4: 0}, 2) == [] == same_core_pinning._busiest({}, 2)


def test_processes_that_have_ended_are_ignored(start):
    placement, (pid, *others) = ThreadPlacement(), start()
    placed(placement, 0, (pid, *others), 2**22 + 1)
    assert len(os.sched_getaffinity(pid)) == 1
    placement.release(0, [2**22 + 1, pid])
    assert os.sched_getaffinity(pid) == set(CORES)
