"""Marker files of prepared arms: what an arm needs is compiled once per machine and code."""

from __future__ import annotations

import hashlib
import sys
import time
from functools import cache
from pathlib import Path

from labkit.config import Engine, from_plain, is_class_path, user_classes
from labkit.machine import cache_entries
from labkit.machine.facts import machine_snapshot
from labkit.records import Arm

# Options of a workload on which no compiled code depends: the cells of a sweep share the rest.
NOT_COMPILED = ("arrivals", "limits", "capacity", "stagger_ms", "per_request", "step_trace")


def marker_path(arm: Arm) -> Path:
    """Return the path of the marker file of a prepared arm.

    The file's name is a hash of everything that compiled code depends on. The file lies in numba's
    cache, so that it is deleted with the cache.
    """
    cpu = str(machine_snapshot.facts().get("cpu_model"))
    workload = {k: v for k, v in arm.config.get("workload", {}).items() if k not in NOT_COMPILED}
    config = {**arm.config, "workload": workload}
    facts = (
        _source(),
        machine_snapshot.versions(),
        sys.version,
        config,
        cpu,
        dict(arm.environment),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return cache_entries.root() / "numba" / f"prepared-{digest[:32]}"


@cache
def _source() -> str:
    package, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_marker(marker: Path, arm: Arm) -> None:
    """Mark an arm as prepared, unless it has classes of the user's own, which may change."""
    own = user_classes(from_plain(Engine, arm.config.get("engine", {})))
    kind = arm.config.get("workload", {}).get("kind", "")
    if not own and not is_class_path(kind):
        cache_entries.write_file(marker, f"{time.time():.0f}\n".encode())
