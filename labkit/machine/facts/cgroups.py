"""Memory and CPU limits of this process's control groups on Linux.

A limit applies wherever it is set: in this process's cgroup or any ancestor, in the hierarchy of
cgroup v2 or of a v1 controller.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")

# cgroup v1 writes "no limit" as a number near 2**63.
UNLIMITED_BYTES = 1 << 62
# File names of cgroup v2 and v1.
LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
USAGE_FILES = ("memory.current", "memory.usage_in_bytes")
# Page cache that the kernel reclaims before it kills a process; names in cgroup v2 and v1.
RECLAIMABLE_FIELDS = ("inactive_file", "total_inactive_file")


def folders(
    controller: str = "", root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE
) -> list[Path]:
    """Return this process's cgroup folder and its ancestors, innermost first.

    ``controller``: a cgroup v1 controller, whose hierarchy is ``root/controller``, or empty for
    cgroup v2, whose hierarchy is ``root``.
    """
    top = root / controller
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return [top]
    membership_path = next((path for _, names, path in lines if controller in names.split(",")), "")
    own = top / membership_path.strip("/")
    # In a container the path may be the host's, which does not exist inside.
    while own != top and not own.is_dir():
        own = own.parent
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))]


def memory_limit() -> int | None:
    """Return the smallest memory limit on this process in bytes, or None without a limit."""
    limits = [_folder_memory_limit(folder) for folder in _candidate_folders("memory")]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_headroom() -> int | None:
    """Return the smallest number of bytes left under any memory limit, or None without a limit."""
    headrooms = [_folder_memory_headroom(folder) for folder in _candidate_folders("memory")]
    return min((bytes_left for bytes_left in headrooms if bytes_left is not None), default=None)


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE) -> float | None:
    """Return the smallest CPU quota on this process in cores, or None without a quota."""
    quotas = [folder_cpu_quota(folder) for folder in _candidate_folders("cpu", root, membership)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _candidate_folders(controller: str, *place: Path) -> list[Path]:
    return [*folders("", *place), *folders(controller, *place)]


def _folder_memory_limit(folder: Path) -> int | None:
    value = _read_number(folder, LIMIT_FILES)
    return None if value is None or value >= UNLIMITED_BYTES else value


def _folder_memory_headroom(folder: Path) -> int | None:
    limit, used = _folder_memory_limit(folder), _read_number(folder, USAGE_FILES)
    if limit is None or used is None:
        return None
    return max(0, limit - used + _reclaimable_bytes(folder))


def folder_cpu_quota(folder: Path) -> float | None:
    """Return the CPU quota in cores that one cgroup folder sets, or None without a quota."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read_number(folder: Path, names: tuple[str, ...]) -> int | None:
    for name in names:
        with suppress(OSError):
            text = (folder / name).read_text().strip()
            return None if text == "max" else int(text)
    return None


def _reclaimable_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    return next((int(fields[key]) for key in RECLAIMABLE_FIELDS if key in fields), 0)
