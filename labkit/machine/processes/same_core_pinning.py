"""Thread placement: the busiest threads of processes that take turns run on the same cores.

The cores of a virtual machine often differ in speed for seconds (the same loop took 1.0 ms on one
and 0.6 ms on the other), and the scheduler leaves a busy thread where it is. Arms in one process
share its threads. The threads of arms in processes of their own are placed on the cores on which
those of the first arm ran. Two servers of labkit, one a copy or with a planted delay, then differed
from set to set by 1.3 to 2.1 % (two studies of five and six sets), without by 2.2 to 3.9 %.

Only Linux can place threads. Elsewhere nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_SHARE = 0.25  # of the busiest thread's CPU time; threads with less may run on any core
LAST_CORE = 36  # index of the core in /proc/PID/task/TID/stat, counted after the name


@dataclass(frozen=True)
class _ArmThreads:
    """The CPU time (ns) of an arm's threads at the start, and the masks that exclude cores.

    Threads with one of these masks, also later ones that inherit it, are left alone.
    """

    cpu_ns: dict[int, int]
    own_masks: list[set[int]]


class ThreadPlacement:
    """Places the busiest threads of each arm, at most one per core; one object for all arms.

    An arm's processes must be stopped when its threads are placed.
    """

    def __init__(self) -> None:
        self._allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
        self._arms: dict[int, _ArmThreads] = {}
        self._cores: list[int] = []  # of the first arm's threads, in the order of their creation

    def place(self, arm: int, pids: Iterable[int]) -> None:
        """Place the threads that were busiest since the first call for this arm.

        ``arm``: index of the arm. ``pids``: ids of the arm's processes.
        """
        if len(self._allowed) < 2:
            return
        times = {thread: ns for thread in _threads(pids) if (ns := _cpu_ns(thread)) is not None}
        known = self._arms.get(arm)
        if known is None:
            masks = [mask for thread in times if (mask := _affinity(thread)) is not None]
            self._arms[arm] = _ArmThreads(times, [mask for mask in masks if mask != self._allowed])
            return
        used = {
            thread: ns - known.cpu_ns.get(thread, 0)
            for thread, ns in times.items()
            if self._may_place(thread, known)
        }
        busiest = _busiest(used, len(self._allowed))
        self._apply(used, dict(zip(busiest, self._cores_for(busiest), strict=True)))

    def _may_place(self, thread: int, known: _ArmThreads) -> bool:
        """Return whether the thread may run on every core, or has a core from this object.

        A thread inherits the mask of the thread that creates it, so a new one may have such a core.
        """
        mask = _affinity(thread)
        placed = mask in [{core} for core in self._cores] and mask not in known.own_masks
        return mask == self._allowed or placed

    def _cores_for(self, threads: list[int]) -> list[int]:
        for thread in threads[len(self._cores) :]:
            free = sorted(self._allowed - set(self._cores))
            last = _last_core(thread)
            self._cores.append(last if last in free else free[0])
        return self._cores[: len(threads)]

    def _apply(self, threads: Iterable[int], cores: dict[int, int]) -> None:
        """Set the affinity masks. Threads that are not in ``cores`` may run on every core."""
        for thread in threads:
            mask = {cores[thread]} if thread in cores else self._allowed
            if _affinity(thread) != mask:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread, mask)

    def release(self, arm: int, pids: Iterable[int]) -> None:
        """Let the arm's threads run on every core again."""
        known = self._arms.pop(arm, None)
        if known is not None:
            self._apply([t for t in _threads(pids) if self._may_place(t, known)], {})


def _busiest(used: dict[int, int], most: int) -> list[int]:
    """Return the threads with the most CPU time, at most ``most``, in the order of creation."""
    ranked = sorted(used, key=lambda thread: used[thread], reverse=True)[:most]
    limit = MIN_SHARE * used[ranked[0]] if ranked else 0.0
    return sorted(thread for thread in ranked if used[thread] >= limit and used[thread] > 0)


def _threads(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        with contextlib.suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _cpu_ns(thread: int) -> int | None:
    """Return a thread's CPU time in ns; None if it has ended or the kernel does not count it."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _last_core(thread: int) -> int | None:
    try:
        fields = Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()
        return int(fields[LAST_CORE])
    except (OSError, ValueError, IndexError):
        return None


def _affinity(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return None
