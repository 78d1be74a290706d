"""A limit on the memory that this process may take from here on.

A cgroup (v2, else v1) where this user may make one: the kernel counts pages that are
touched, and kills the process that has too many. Elsewhere the address space is limited
(``RLIMIT_AS``): a reservation counts whether it is touched or not, and the allocation that
exceeds it fails. What the process held before is not counted in either.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from labkit.machine import cgroups


@dataclass(frozen=True)
class CgroupVersion:
    """By which controller and file names a cgroup version limits memory."""

    name: str
    controller: str  # of cgroup v1
    most: str
    swap: str
    kills: str


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


def apply_memory_limit(count: int) -> str:
    """Let this process take ``count`` more bytes; return what holds the limit.

    ``cgroup v2``, ``cgroup v1`` or ``RLIMIT_AS``.

    Raises
    ------
    OSError
        The system refuses every kind of limit.
    """
    for version in CGROUP_VERSIONS:
        if _join_cgroup(version, count):
            return version.name
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + count, hard))
    return "RLIMIT_AS"


def _join_cgroup(version: CgroupVersion, count: int) -> bool:
    """Move this process into a new cgroup of ``count`` bytes; False where that is refused."""
    folder = _limited_cgroup(version, os.getpid())
    try:
        folder.mkdir()
    except OSError:
        return False
    try:
        if not (folder / version.most).exists():  # a plain folder, or no memory controller
            raise FileNotFoundError(folder)
        (folder / version.most).write_text(str(count))
        with contextlib.suppress(OSError):  # no swap accounting: swap is not limited
            (folder / version.swap).write_text("0" if "max" in version.swap else str(count))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        folder.rmdir()
        return False
    return True


def _limited_cgroup(version: CgroupVersion, pid: int) -> Path:
    """Return the cgroup that ``pid`` is limited by, whether it exists or not.

    It lies beside the caller's own (v2 allows no processes between two levels), and the
    caller's child is in the same group as the caller.
    """
    own, *above = cgroups.folders(version.controller)
    return (above or [own])[0] / f"labkit-{pid}"


def release_memory_limit(pid: int) -> int:
    """Remove the cgroup of a process that has ended; return how often it killed for memory.

    0 where there was none.
    """
    kills = 0
    for version in CGROUP_VERSIONS:
        folder = _limited_cgroup(version, pid)
        if not folder.is_dir():
            continue
        with contextlib.suppress(OSError, ValueError, LookupError):
            events = dict(
                line.split() for line in (folder / version.kills).read_text().splitlines()
            )
            kills += int(events["oom_kill"])
        with contextlib.suppress(OSError):
            folder.rmdir()
    return kills
