"""Memory of the machine, of the container and of this process. All sizes in bytes."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit.machine import memory_linux
from labkit.machine.cgroups import cgroup_folders


@dataclass(frozen=True)
class Memory:
    """A reading. ``cgroup_limit`` is None where no container limits the process.

    ``available`` counts what the container's limit leaves, where that is less.
    """

    total: int
    available: int
    swap_total: int
    swap_used: int
    cgroup_limit: int | None

    @property
    def limit(self) -> int:
        """What this process can ever have: the machine's memory or the container's limit."""
        return self.total if self.cgroup_limit is None else min(self.total, self.cgroup_limit)


def read() -> Memory:
    """Read the machine's and the container's memory now."""
    import psutil

    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    rooms = [memory_linux.room(folder) for folder in _cgroups()]
    return Memory(
        total=machine.total,
        available=min([machine.available, *(room for room in rooms if room is not None)]),
        swap_total=swap.total,
        swap_used=swap.used,
        cgroup_limit=cgroup_limit(),
    )


def cgroup_limit() -> int | None:
    """Return the smallest memory limit of this process's cgroups and all above; None: none."""
    limits = [memory_linux.limit(folder) for folder in _cgroups()]
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroups() -> list[Path]:
    """Return where limits may be stated: in v2's hierarchy, and in v1's of memory."""
    return [*cgroup_folders(), *cgroup_folders(controller="memory")]


@dataclass(frozen=True)
class ProcessMemory:
    """What a process has in memory and in swap (None where the system does not say)."""

    resident: int
    swapped: int | None


def process(pid: int | None = None) -> ProcessMemory:
    """Read a process's memory now; by default this one's.

    Raises
    ------
    OSError
        There is no such process, or the system does not say.
    """
    if sys.platform == "linux":
        sizes = memory_linux.process_sizes("self" if pid is None else str(pid))
        return ProcessMemory(sizes["VmRSS"], sizes.get("VmSwap"))
    import psutil

    try:
        return ProcessMemory(int(psutil.Process(pid).memory_info().rss), None)
    except psutil.Error as error:
        raise OSError(str(error)) from None


def peak_rss() -> int:
    """Return the largest resident size that this process has had.

    Linux: ``VmHWM``; ``getrusage`` would count the parent that forked this process.
    """
    if sys.platform == "linux":
        peak = memory_linux.process_sizes("self").get("VmHWM")
        if peak is not None:
            return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
