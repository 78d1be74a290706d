"""Study history: the noise and cost of earlier studies of a workload on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from labkit.analysis.statistics.power import alpha_share, degrees_of_freedom
from labkit.config import Experiment, Isolation, to_plain
from labkit.experiment.compose.cell_composer import ComposedCell
from labkit.machine.facts import machine_snapshot
from labkit.records import (
    Arm,
    RecordError,
    StudyPath,
    machine_difference,
    read_arms,
    read_cell,
    read_runs,
)

MAX_CELLS = 40  # number of newest cells that are read
MIN_DEGREES_OF_FREEDOM = 3  # for an estimate of noise


@dataclass(frozen=True)
class MeasuredCell:
    """A measured cell: its folder, its manifest, and its baseline with the options of today."""

    folder: StudyPath
    manifest: Mapping[str, Any]
    baseline: Arm


class StudyHistory:
    """The newest cells measured on this kind of machine, each read once.

    ``out``: a folder to search for cells, besides ``outputs``. ``authors``: cells of somebody
    else's study, on any machine. They count where this machine has none.
    """

    def __init__(self, out: Path, authors: Sequence[MeasuredCell] = ()) -> None:
        self._roots, self._authors = (out, Path("outputs")), authors

    def studies(
        self, composed: ComposedCell, isolation: Isolation | None = None
    ) -> Iterator[tuple[StudyPath, Mapping[str, Any]]]:
        """Yield the folder and manifest of comparable cells, the newest first.

        A cell is comparable if its baseline has the same workload (and the same model, if it
        serves requests) and its isolation is ``isolation``, by default that of ``composed``.
        """
        experiment = composed.experiments[composed.arms[0].name]
        isolation_name = (isolation or composed.isolation).value
        for cell in (*self._cells, *self._authors):
            old_isolation = cell.manifest["design"].get("isolation", "process")
            if old_isolation == isolation_name and _same_workload(cell.baseline, experiment):
                yield cell.folder, cell.manifest

    def source(self, folder: StudyPath) -> str:
        """Return a cell's folder as text that says whether somebody else measured it."""
        authors = any(cell.folder == folder for cell in self._authors)
        return f"{folder}, the author's" if authors else str(folder)

    @cached_property
    def _cells(self) -> Sequence[MeasuredCell]:
        cells, this_machine = [], machine_snapshot.take()
        patterns = ["*/" * depth + "cell.json" for depth in range(1, 5)]
        files = {path for root in self._roots for one in patterns for path in root.glob(one)}
        newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest[:MAX_CELLS]:
            try:
                manifest, arms = read_cell(path.parent), read_arms(path.parent)
            except RecordError:
                continue
            environment = manifest.get("environment", {})
            same = machine_difference(environment, this_machine) is None
            if same and arms and arms[0].role == "baseline":
                cells.append(MeasuredCell(path.parent, manifest, arms[0]))
        return cells


def _same_workload(old: Arm, experiment: Experiment) -> bool:
    """Return whether workload and model are the same, but for options that ``old`` lacks."""
    same = _has(to_plain(experiment.workload), old.config["workload"])
    loads_model = experiment.workload.loads_model
    return same and (not loads_model or _has(to_plain(experiment.model), old.config["model"]))


def has_arms(folder: StudyPath, arms: Sequence[Arm]) -> bool:
    """Return whether the cell in a folder has these arms, whatever its seed."""
    try:
        old = {arm.name: {**arm.config, "seed": 0} for arm in read_arms(folder)}
    except RecordError:
        return False
    new = {arm.name: {**arm.config, "seed": 0} for arm in arms}
    return old.keys() == new.keys() and all(_has(new[name], old[name]) for name in new)


def _has(options: Any, old: Any) -> bool:
    """Return whether options have all values of old ones, which lack some of today's."""
    if not isinstance(options, dict) or not isinstance(old, dict):
        return bool(options == old)
    return all(key in options and _has(options[key], value) for key, value in old.items())


@dataclass(frozen=True)
class CellNoise:
    """The noise of a cell: medians over its arms and over its rows of certain metrics."""

    sd: float  # standard deviation between runs (log scale)
    # The share of an arm's alpha that each of its rows gets; None if it is unknown, or no p-value
    # could reach alpha.
    alpha_share: float | None
    degrees_of_freedom: int | None  # of ``sd``, the smallest of all rows and arms; None: unknown


def cell_noise(manifest: Mapping[str, Any], metrics: Sequence[str] = ()) -> CellNoise | None:
    """Return the noise in a cell's manifest, or None if it has no results or too few blocks.

    ``metrics``: the metrics whose rows count; if empty, the cell's primary metrics.
    """
    runs = int(manifest["design"]["runs_per_block"])
    measured = [
        (row["primary"], comparison)
        for row in manifest.get("rows", [])
        if (row["metric"] in metrics if metrics else row["primary"]) and not row["skipped"]
        for comparison in row["comparisons"]
        if comparison.get("sd") is not None
        and degrees_of_freedom(comparison["blocks"], runs) >= MIN_DEGREES_OF_FREEDOM
    ]
    if not measured:
        return None
    comparisons = [comparison for _, comparison in measured]
    roles = {arm["name"]: arm["role"] for arm in manifest["arms"]}
    arms = sum(role == "arm" for role in roles.values())
    shares = [
        alpha_share(c["alpha_row"], c["blocks"], runs, (1.0 - c["level"]) / arms)
        for primary, c in measured
        if primary and c["alpha_row"] and c["level"] is not None and roles[c["arm"]] == "arm"
    ]
    return CellNoise(
        median(c["sd"] for c in comparisons),
        median(shares) if shares else None,
        min(degrees_of_freedom(c["blocks"], runs) for c in comparisons),
    )


def median_block_s(cell_dir: StudyPath) -> float | None:
    """Return the median wall seconds of a cell's complete blocks, or None if there are none."""
    try:
        arms = {arm.name: arm for arm in read_arms(cell_dir)}
        records = read_runs(cell_dir)
    except RecordError:
        return None
    blocks: dict[int, list[float | None]] = {}
    for record in records:
        accepted = record.arm in arms and arms[record.arm].accepts(record)
        spent = record.seconds.get("process") if accepted else None
        blocks.setdefault(record.block, []).append(spent)
    complete = [sum(s for s in spent if s) for spent in blocks.values() if all(spent)]
    return median(complete) if complete else None


def median_start_up_s(cell_dir: StudyPath) -> float | None:
    """Return the median seconds that a cell's runs take outside their measurement, if recorded."""
    try:
        records = read_runs(cell_dir)
    except RecordError:
        return None
    spent = [s for record in records if record.ok and (s := record.start_up_s) is not None]
    return median(spent) if spent else None
