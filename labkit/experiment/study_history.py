"""Earlier studies of the same workload on this machine: their noise and what a run cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from labkit.analysis.statistics.power import degrees_of_freedom
from labkit.config import Experiment, Isolation, to_plain
from labkit.experiment.cell_composer import ComposedCell
from labkit.machine import fingerprint
from labkit.records import Arm, RecordError, machine_difference, read_arms, read_cell, read_runs

LOOKED_THROUGH = 40  # cells, newest first
FEWEST_LEFT = 3  # degrees of freedom; a noise from fewer is none


class StudyHistory:
    """The newest cells that were studied on this kind of machine, each read once.

    Parameters
    ----------
    out
        They are looked for here and in ``outputs``.
    """

    def __init__(self, out: Path) -> None:
        self._roots = (out, Path("outputs"))

    def studies(
        self, composed: ComposedCell, isolation: Isolation | None = None
    ) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """Yield the folder and ``cell.json`` of comparable cells, the newest first.

        Comparable: the baselines' workload (served: their model too) and isolation, by
        default the cell's own.
        """
        ours = composed.experiments[composed.arms[0].name]
        wanted = (isolation or composed.isolation).value
        for folder, data, baseline in self._cells:
            where = data["design"].get("isolation", "process")
            if where == wanted and _same_work(baseline, ours):
                yield folder, data

    @cached_property
    def _cells(self) -> Sequence[tuple[Path, Mapping[str, Any], Arm]]:
        """Every cell's folder, ``cell.json`` and baseline."""
        found, here = [], fingerprint.take()
        files = {path for root in self._roots for path in _files(root)}
        newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest[:LOOKED_THROUGH]:
            try:
                data, arms = read_cell(path.parent), read_arms(path.parent)
            except RecordError:
                continue
            same = machine_difference(data.get("environment", {}), here) is None
            if same and arms and arms[0].role == "baseline":
                found.append((path.parent, data, arms[0]))
        return found


def _same_work(kept: Arm, ours: Experiment) -> bool:
    """Compare what is asked; an option that a record is too old to know is not compared."""
    asked = to_plain(ours.workload)
    same = all(asked.get(key) == value for key, value in kept.config["workload"].items())
    served = ours.workload.serves
    return same and (not served or kept.config["model"]["name"] == ours.model.name)


def _files(root: Path) -> Iterator[Path]:
    for pattern in ("*/cell.json", "*/*/cell.json", "*/*/*/cell.json"):
        yield from root.glob(pattern)


@dataclass(frozen=True)
class Noise:
    """What a cell's primary rows say about noise, medians over rows and arms.

    ``sd``: between runs, log scale. ``share``: the part of one arm's alpha that a row alone
    has where the rows share it; None where no alpha could be reached.
    """

    sd: float
    share: float | None


def noise(data: Mapping[str, Any]) -> Noise | None:
    """Read a cell's noise from its ``cell.json``; None: none is known, or too few blocks."""
    runs = int(data["design"]["runs_per_block"])
    found = [
        comparison
        for row in data.get("rows", [])
        if row["primary"] and not row["skipped"]
        for comparison in row["comparisons"]
        if comparison.get("sd") is not None
        and degrees_of_freedom(comparison["blocks"], runs) >= FEWEST_LEFT
    ]
    if not found:
        return None
    roles = {arm["name"]: arm["role"] for arm in data["arms"]}
    arms = sum(role == "arm" for role in roles.values())
    shares = [
        arms * c["alpha_row"] / (1.0 - c["level"])
        for c in found
        if c["alpha_row"] and c["level"] is not None and roles[c["arm"]] == "arm"
    ]
    return Noise(median(c["sd"] for c in found), median(shares) if shares else None)


def block_s(cell_dir: Path) -> float | None:
    """Return the median wall seconds of a cell's whole blocks, or None if not known."""
    try:
        records = read_runs(cell_dir)
    except RecordError:
        return None
    blocks: dict[int, list[float | None]] = {}
    for record in records:
        spent = record.seconds.get("process") if record.ok else None
        blocks.setdefault(record.block, []).append(spent)
    whole = [sum(s for s in spent if s) for spent in blocks.values() if all(spent)]
    return median(whole) if whole else None


def start_up(cell_dir: Path) -> float | None:
    """Return the median seconds that a run of a cell cost beyond its measurement."""
    try:
        records = read_runs(cell_dir)
    except RecordError:
        return None
    spent = [s for record in records if record.ok and (s := record.start_up_s) is not None]
    return median(spent) if spent else None
