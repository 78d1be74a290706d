"""What Linux tells about memory: sizes of a process, limit and room of a cgroup."""

from __future__ import annotations

from pathlib import Path

# v1 says "no limit" with a number near 2**63.
UNLIMITED = 1 << 62
# v2's name, v1's name.
LIMITS = ("memory.max", "memory.limit_in_bytes")
USED = ("memory.current", "memory.usage_in_bytes")
STAT = "memory.stat"
# Pages of files that the kernel drops before it kills.
RECLAIMABLE = ("inactive_file", "total_inactive_file")


def process_sizes(pid: str) -> dict[str, int]:
    """Return a process's ``Vm*`` sizes from ``/proc/PID/status``, in bytes.

    Raises
    ------
    OSError
        It is gone, or a zombie, which has no memory left.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("Vm")]
    if not words:
        raise OSError(f"process {pid} has no memory")
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}


def limit(folder: Path) -> int | None:
    """Return the limit (bytes) that one cgroup folder states, or None."""
    value = _number(folder, LIMITS)
    return None if value is None or value >= UNLIMITED else value


def room(folder: Path) -> int | None:
    """Return the bytes left below the folder's limit, or None where it has none."""
    most, used = limit(folder), _number(folder, USED)
    if most is None or used is None:
        return None
    return max(0, most - used + _reclaimable(folder))


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / STAT).read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines)
    return next((int(found[key]) for key in RECLAIMABLE if key in found), 0)
