"""Memory of the machine, of the container and of this process. All sizes in bytes."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """A reading. ``cgroup_limit`` is None where no container limits the process."""

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
    return Memory(
        total=machine.total,
        available=machine.available,
        swap_total=swap.total,
        swap_used=swap.used,
        cgroup_limit=cgroup_limit(),
    )


def cgroup_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the container's memory limit, or None (cgroup v2, else v1)."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        # v1 says "no limit" with a number near 2**63
        return None if text == "max" or int(text) >= 1 << 62 else int(text)
    return None


def peak_rss() -> int:
    """Return the largest resident size that this process has had.

    Linux: ``VmHWM``; ``getrusage`` would count the parent that forked this process.
    """
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
