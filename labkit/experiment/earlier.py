"""Earlier studies of the same workload on this machine: their noise and what a run cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from labkit.experiment import environment
from labkit.experiment.arms import ComposedCell
from labkit.experiment.record import RecordError, read_arms, read_cell, read_runs

LOOKED_THROUGH = 40  # cells, newest first


def studies(composed: ComposedCell, out: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the folder and ``cell.json`` of comparable cells, the newest first.

    Comparable: the same kind of machine, workload and isolation. They are looked for in
    ``out`` and in ``outputs``.
    """
    here = environment.fingerprint()
    whole = composed.experiment
    folders = {path for root in (out, Path("outputs")) for path in _cells(root)}
    newest = sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:LOOKED_THROUGH]:
        try:
            data, arms = read_cell(path.parent), read_arms(path.parent)
        except RecordError:
            continue
        same = environment.same_machine(data.get("environment", {}), here)
        isolation = data["design"].get("isolation", "process")
        if (
            same
            and isolation == composed.isolation.value
            and arms
            and arms[0].config["workload"]["name"] == whole.workload.name
        ):
            yield path.parent, data


def _cells(root: Path) -> Iterator[Path]:
    for pattern in ("*/cell.json", "*/*/cell.json", "*/*/*/cell.json"):
        yield from root.glob(pattern)


def noise(data: Mapping[str, Any]) -> float | None:
    """Give the median noise between runs (standard deviation, log scale) of a cell.

    From the smallest detectable effects of its primary rows; None where none is known.
    """
    from labkit.analysis.effect import log_ratio
    from labkit.analysis.power import detectable_pct

    design = data["design"]
    unit = detectable_pct(0.01, design["blocks"], design["runs_per_block"], design["alpha"])
    seen = [
        comparison["mde_pct"]
        for row in data.get("rows", [])
        if row["primary"] and not row["skipped"]
        for comparison in row["comparisons"]
        if comparison["mde_pct"] is not None and math.isfinite(comparison["mde_pct"])
    ]
    if not seen or unit is None:
        return None
    return 0.01 * log_ratio(median(seen)) / log_ratio(unit)


def start_up(cell_dir: Path) -> float | None:
    """Give the median seconds that a run of a cell cost beyond its measurement."""
    try:
        records = read_runs(cell_dir)
    except RecordError:
        return None
    spent = [s for record in records if record.ok and (s := record.start_up_s) is not None]
    return median(spent) if spent else None
