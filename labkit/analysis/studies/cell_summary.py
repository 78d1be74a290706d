"""What a study's pages say of each cell, without its records.

A cell's records and analysis take up to 20 MB; this takes less than a thousandth. So a study of a
thousand cells is read cell by cell, and only this is kept of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.analysis.comparison.arm_comparison import PairedRow, paired_rows, paired_tests
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.findings.answer_data import Findings, plan_findings
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.model.result_row import Row
from labkit.analysis.model.study_model import CellEntry
from labkit.analysis.robustness.caveats import machine_states
from labkit.analysis.robustness.host_groups import machine_name
from labkit.analysis.statistics.multiple_comparisons import RowPermutations
from labkit.analysis.studies.load_curves import ArmLoad, arm_loads
from labkit.analysis.studies.serving_capacity import CapacityLoad, capacity_loads
from labkit.config.arm_sweep import short_names
from labkit.records import PROCESSES_SUFFIX


@dataclass(frozen=True)
class TestedArm:
    """An arm's tests in the primary rows of a cell. ``names``: case and metric of each row."""

    arm: str
    runs: int  # of each arm per block
    names: tuple[tuple[str, str | None], ...]
    rows: tuple[PairedRow, ...]

    def tests(self) -> dict[int, RowPermutations]:
        """Return the rows' permutation tests, in the order of ``names``."""
        return paired_tests(self.rows, self.runs)


@dataclass(frozen=True)
class CellSummary:
    """What a study's pages say of one cell.

    ``machine_states``: as :func:`.caveats.machine_states`. ``loads`` and ``capacities``: what load
    curves and capacities are made of; empty in a cell that only confirms another. ``tested``: the
    arms that may be claimed about. ``unlisted``: the number of records without a digest.
    """

    entry: CellEntry
    title: str
    overrides: tuple[str, ...]
    primary: tuple[Row, ...]
    findings: Findings
    machine_states: Mapping[str, list[str]]
    loads: tuple[ArmLoad, ...] = ()
    capacities: tuple[CapacityLoad, ...] = ()
    tested: tuple[TestedArm, ...] = ()
    unlisted: int = 0

    @property
    def name(self) -> str:
        return self.entry.cell

    @cached_property
    def short_answer(self) -> str:
        return short_answer(self.findings)


def cell_summary(analysis: CellAnalysis) -> CellSummary:
    """Return what a study's pages say of a cell."""
    findings, cell = plan_findings(analysis), analysis.cell
    confirms = analysis.data.dir.name.endswith(PROCESSES_SUFFIX)  # another cell has its loads
    return CellSummary(
        entry=_entry(analysis, findings),
        title=cell.title,
        overrides=tuple(analysis.data.manifest.get("overrides") or [analysis.name]),
        primary=tuple(cell.primary_rows),
        findings=findings,
        machine_states=machine_states(analysis),
        loads=() if confirms else tuple(arm_loads(analysis)),
        capacities=() if confirms else tuple(capacity_loads(analysis)),
        tested=tuple(_tested(analysis)),
        unlisted=analysis.data.unlisted,
    )


def _entry(analysis: CellAnalysis, findings: Findings) -> CellEntry:
    cell, data = analysis.cell, analysis.data
    arms = set(cell.treatment_arms)
    comparisons = (one for row in cell.primary_rows for one in row.comparisons)
    return CellEntry(
        cell=cell.cell,
        dir=data.dir.name,
        machine=machine_name(analysis),
        question=cell.question,
        answer=long_text(findings),
        status=analysis.status,
        complete=data.complete,
        blocks=len(data.blocks_done),
        runs=len(data.records),
        failures=len(cell.failures),
        gates={name: gate.status for name, gate in cell.gates.items()},
        verdicts=dict(Counter(one.verdict for one in comparisons if one.arm in arms)),
    )


def _tested(analysis: CellAnalysis) -> Iterator[TestedArm]:
    """Yield the arms of a cell that have tests; none while nothing may be claimed."""
    data, runs = analysis.data, analysis.data.criteria.runs
    for arm in data.treatment_arms if data.withheld_reason is None else ():
        estimates = data.design.estimates  # nothing is claimed of them
        without = [i for i, row in enumerate(analysis.rows) if row.case in estimates]
        rows = paired_rows(analysis.rows, arm, data.baseline, runs, True, without)
        if rows:
            of_rows = [analysis.rows[row.index] for row in rows]
            names = tuple((row.case, row.metric) for row in of_rows)
            yield TestedArm(arm, runs, names, tuple(rows))


def cell_labels(cells: Sequence[CellSummary], ignore: Collection[str] = ()) -> list[str]:
    """Return a label for each cell, such as ``rate=2``, without the options in ``ignore``.

    If there is only one cell, its label has all its overrides. A cell of an earlier version of
    labkit, which did not list the overrides, is labelled by its name.
    """
    listed = [
        [override for override in cell.overrides if override.partition("=")[0] not in ignore]
        for cell in cells
    ]
    if len(cells) == 1:
        return [", ".join(listed[0]) or cells[0].name]
    common = set.intersection(*map(set, listed))
    varying = [[o for o in overrides if o not in common] for overrides in listed]
    keys = dict.fromkeys(o.partition("=")[0] for overrides in varying for o in overrides)
    short = short_names(list(keys))
    return [
        _label(overrides, short, cell.entry.dir)
        for overrides, cell in zip(varying, cells, strict=True)
    ]


def cell_headings(cells: Sequence[CellSummary]) -> list[str]:
    """Return each cell's title, with its label if other cells have the same title."""
    count = Counter(cell.title for cell in cells)
    return [
        cell.title if count[cell.title] == 1 else f"{cell.title} ({label})"
        for cell, label in zip(cells, cell_labels(cells), strict=True)
    ]


def _label(overrides: Sequence[str], short: dict[str, str], folder: str) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{short[key]}{equals}{value}" for key, equals, value in pairs]
    if folder.endswith(PROCESSES_SUFFIX):
        words.append("in separate processes")
    return ", ".join(words) or "as configured"
