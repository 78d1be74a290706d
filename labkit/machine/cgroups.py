"""The control groups that this process is in, on Linux."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def cgroup_folders(
    root: Path = ROOT, membership: Path = Path("/proc/self/cgroup"), controller: str = ""
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
