"""The control groups that this process is in, on Linux, and what they limit.

A limit counts wherever it is stated: in this process's group or in any above it, in
cgroup v2's hierarchy or in v1's of a controller.
"""

from __future__ import annotations

from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")

# v1 says "no limit" with a number near 2**63.
UNLIMITED_BYTES = 1 << 62
# v2's name, v1's name.
LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
USAGE_FILES = ("memory.current", "memory.usage_in_bytes")
# Pages of files that the kernel drops before it kills.
RECLAIMABLE_FIELDS = ("inactive_file", "total_inactive_file")


def folders(
    controller: str = "", root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE
) -> list[Path]:
    """Return this process's cgroup folder and its ancestors up to the top of its hierarchy.

    ``controller``: of cgroup v1's hierarchy ``root/controller``; empty: of v2's, ``root``.
    """
    top = root / controller
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return [top]
    inside = next((path for _, names, path in lines if controller in names.split(",")), "")
    own = top / inside.strip("/")
    # In a container the path may be the host's, which does not exist in here.
    while own != top and not own.is_dir():
        own = own.parent
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))]


def memory_limit() -> int | None:
    """Return the least memory limit (bytes), or None where there is none."""
    limits = [folder_memory_limit(folder) for folder in _candidate_folders("memory")]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_headroom() -> int | None:
    """Return how many bytes the tightest limit leaves, or None where there is none."""
    rooms = [folder_memory_headroom(folder) for folder in _candidate_folders("memory")]
    return min((room for room in rooms if room is not None), default=None)


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE) -> float | None:
    """Return the least CPU quota in cores, or None where there is none."""
    quotas = [folder_cpu_quota(folder) for folder in _candidate_folders("cpu", root, membership)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _candidate_folders(controller: str, *place: Path) -> list[Path]:
    return [*folders("", *place), *folders(controller, *place)]


def folder_memory_limit(folder: Path) -> int | None:
    """Return the memory limit (bytes) that one folder states, or None."""
    value = _read_number(folder, LIMIT_FILES)
    return None if value is None or value >= UNLIMITED_BYTES else value


def folder_memory_headroom(folder: Path) -> int | None:
    """Return the bytes left below the folder's memory limit, or None where it has none."""
    limit, used = folder_memory_limit(folder), _read_number(folder, USAGE_FILES)
    if limit is None or used is None:
        return None
    return max(0, limit - used + _reclaimable_bytes(folder))


def folder_cpu_quota(folder: Path) -> float | None:
    """Return the CPU quota (cores) that one folder states, or None."""
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
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None


def _reclaimable_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines)
    return next((int(found[key]) for key in RECLAIMABLE_FIELDS if key in found), 0)
