"""Limit the memory that this process may allocate from now on.

If the user may create a cgroup (v2, else v1), the kernel counts the pages that are touched, and
kills the process when it exceeds the limit. Otherwise the address space is limited (``RLIMIT_AS``):
untouched reservations count as well, and an allocation that exceeds the limit fails. In both cases
memory that the process had before does not count.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit.machine.facts import cgroups


class MemoryLimitError(ValueError):
    """The memory of this process cannot be limited. The message is one line."""


@dataclass(frozen=True)
class CgroupVersion:
    """A cgroup version: the controller and the file names for limiting memory."""

    name: str
    controller: str  # empty for cgroup v2
    limit_file: str
    swap_file: str
    events_file: str


CGROUP_VERSIONS = (
    CgroupVersion("cgroup v2", "", "memory.max", "memory.swap.max", "memory.events"),
    CgroupVersion(
        "cgroup v1",
        "memory",
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.oom_control",
    ),
)


def apply_memory_limit(limit_bytes: int) -> str:
    """Let this process allocate at most ``limit_bytes`` from now on; return the mechanism's name.

    The name is ``cgroup v2``, ``cgroup v1`` or ``RLIMIT_AS``. Raises ``MemoryLimitError`` if the
    system is not Linux, or a limit that is set already is lower.
    """
    if sys.platform != "linux":
        raise MemoryLimitError("engine.memory_limit: it has an effect on Linux only; leave it null")
    for version in CGROUP_VERSIONS:
        if _join_cgroup(version, limit_bytes):
            return version.name
    current = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY and current + limit_bytes > hard:
        raise MemoryLimitError(
            f"engine.memory_limit={limit_bytes}: this process may allocate only {hard - current} "
            "more bytes (ulimit -Hv)"
        )
    resource.setrlimit(resource.RLIMIT_AS, (current + limit_bytes, hard))
    return "RLIMIT_AS"


def _join_cgroup(version: CgroupVersion, limit_bytes: int) -> bool:
    """Move this process into a new cgroup limited to ``limit_bytes``, if that is permitted."""
    folder = _limited_cgroup(version, os.getpid())
    try:
        folder.mkdir()
    except OSError:
        return False
    try:
        if not (folder / version.limit_file).exists():
            raise FileNotFoundError(folder)  # no cgroup file system, or no memory controller
        (folder / version.limit_file).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # without swap accounting, swap is not limited
            swap = "0" if "max" in version.swap_file else str(limit_bytes)
            (folder / version.swap_file).write_text(swap)
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        folder.rmdir()
        return False
    return True


def _limited_cgroup(version: CgroupVersion, pid: int) -> Path:
    """Return the path of the cgroup that limits process ``pid``, which need not exist.

    It is a sibling of the one that process ``pid`` starts in, because cgroup v2 allows
    processes only in leaves. Call this only from that cgroup: in process ``pid`` before it moves,
    or in its parent.
    """
    own, *ancestors = cgroups.folders(version.controller)
    return (ancestors or [own])[0] / f"labkit-{pid}"


def release_memory_limit(pid: int) -> int:
    """Remove the cgroup of a process that has ended, if any; return its out-of-memory kills."""
    kills = 0
    for version in CGROUP_VERSIONS:
        folder = _limited_cgroup(version, pid)
        if not folder.is_dir():
            continue
        with contextlib.suppress(OSError, ValueError, LookupError):
            lines = (folder / version.events_file).read_text().splitlines()
            kills += int(dict(line.split() for line in lines)["oom_kill"])
        with contextlib.suppress(OSError):
            folder.rmdir()
    return kills
