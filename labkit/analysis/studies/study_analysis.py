"""Analysis of a study: its cells, their analyses, and p-values adjusted over all cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from labkit.analysis.comparison.best_setting import is_decided, tested_rows
from labkit.analysis.comparison.cell_analysis import CellAnalysis, analyse
from labkit.analysis.comparison.observations import arm_values
from labkit.analysis.comparison.perplexity_and_kl import limits_decided
from labkit.analysis.comparison.verdict import DECIDED_WORDS
from labkit.analysis.model.study_model import FamilyMember, Study
from labkit.analysis.number_format import interval_text, percent_text
from labkit.analysis.robustness.cells_by_host import host_groups
from labkit.analysis.statistics.multiple_comparisons import joint_p_values
from labkit.analysis.statistics.text_window_intervals import LOOK_CONFIDENCE
from labkit.analysis.studies.cell_summary import CellSummary
from labkit.analysis.studies.increasing_load import rate_is_decided
from labkit.analysis.studies.study_discovery import cell_dirs, is_cell
from labkit.config import count_text
from labkit.records import (
    PROCESSES_SUFFIX,
    SCHEMA_VERSION,
    ArchivePath,
    Record,
    StudyPath,
    open_study,
    read_json,
)

T = TypeVar("T")
Stamp = frozenset[tuple[str, int, int]]
MAX_RECORDS = 1000  # with their analyses, up to 0.5 GB


class AnalysisCache:
    """Cache of cell analyses; a cell is analysed again only if its runs have changed.

    ``max_records``: forget the cells that were asked for first once the others have so many
    records. None: keep all.
    """

    def __init__(self, max_records: int | None = None) -> None:
        self._max_records = max_records
        self._known: dict[StudyPath, tuple[Stamp, CellAnalysis]] = {}
        self._counts: dict[StudyPath, tuple[int, int]] = {}  # records without digest, and of all

    def cell(self, cell_dir: StudyPath) -> CellAnalysis:
        """Return a cell's analysis, from the cache unless its runs have changed.

        Raises :class:`RecordError` if a file of the cell is not valid.
        """
        stamp, known = _stamp(cell_dir), self._known.pop(cell_dir, None)
        if known is None or known[0] != stamp:
            known = stamp, analyse(cell_dir, lambda: self._companion(cell_dir))
            data = known[1].data
            self.count(cell_dir, data.unlisted, len(data.records))
        self._known[cell_dir] = known
        kept = sum(len(analysis.data.records) for _, analysis in self._known.values())
        while self._max_records is not None and kept > self._max_records and len(self._known) > 1:
            _, forgotten = self._known.pop(next(iter(self._known)))
            kept -= len(forgotten.data.records)
        return known[1]

    def count(self, cell_dir: StudyPath, unlisted: int, records: int) -> None:
        """Count a cell's records without a digest, and all of its records, for :meth:`notes`."""
        self._counts[cell_dir] = unlisted, records

    def lazily(self, study_dir: StudyPath) -> Lazily[CellAnalysis]:
        """Return the analyses of a study's cells, each of which is read when it is asked for."""
        return Lazily(cell_dirs(study_dir), self.cell)

    def study(self, study_dir: StudyPath) -> list[CellAnalysis]:
        """Return the analyses of a study's cells; raise :class:`RecordError` for a bad file."""
        return [self.cell(path) for path in cell_dirs(study_dir)]

    def undecided_cases(self, cell_dir: StudyPath) -> list[str]:
        """Return the cases with a primary row in which a treatment arm has no decided verdict.

        Arms that claim to run out of memory are left out. In a sweep all cases are undecided until
        only one setting may be the best in every primary row but estimates. With
        ``workload.capacity`` all are undecided until every arm is shown to keep its target share,
        or to miss it.
        """
        analysis = self.cell(cell_dir)
        primary = [row.case for row in analysis.rows if row.primary]
        if analysis.data.sweep:
            return [] if is_decided(analysis.best) else primary
        if rate_is_decided(analysis) is False:
            return primary
        claimed = {arm.name for arm in analysis.data.arms if arm.out_of_memory}
        arms = set(analysis.data.treatment_arms) - claimed
        pairs = ((row.case, one) for row in analysis.cell.primary_rows for one in row.comparisons)
        judged = [(case, one.verdict) for case, one in pairs if one.arm in arms]
        if not judged:  # a baseline alone has nothing to decide but its capacity
            return [] if rate_is_decided(analysis) else primary
        return [case for case, word in judged if word not in DECIDED_WORDS | {"computed"}]

    def limits_decided(
        self, arms: Sequence[str], records: Sequence[Record], limits: Mapping[str, float]
    ) -> bool:
        """Return whether a look at scored texts decides all limits on the arms' quality."""
        return limits_decided(arms, records, limits, LOOK_CONFIDENCE)

    def decided_rows(self, cell_dir: StudyPath, cases: Collection[str]) -> list[Mapping[str, str]]:
        """Return the word and the numbers of each arm in each primary row of decided cases."""
        cell = self.cell(cell_dir).cell
        arms = {arm.name for arm in cell.arms if arm.role == "arm"}
        return [
            {
                "row": cell.row_name(row),
                "arm": one.arm,
                "verdict": one.verdict,
                "effect": percent_text(one.effect_pct),
                "interval": interval_text(one.ci_low_pct, one.ci_high_pct),
            }
            for row in cell.rows
            if row.primary and row.case in cases
            for one in row.comparisons
            if one.arm in arms
        ]

    def objective(self, cell_dir: StudyPath) -> float | None:
        return objective(self.cell(cell_dir))

    def notes(self) -> list[str]:
        """Return a line for each study read so far that has records without a digest."""
        counts: dict[StudyPath, tuple[int, int]] = {}
        for cell_dir, (unlisted, records) in self._counts.items():
            before = counts.get(cell_dir.parent, (0, 0))
            counts[cell_dir.parent] = before[0] + unlisted, before[1] + records
        return [undigested_note(study, *count) for study, count in counts.items() if count[0]]

    def possibly_best(self, cell_dir: Path) -> list[str]:
        """Return the arms of a sweep that may be the best in some primary row but estimates.

        If nothing may be claimed in some row yet, all arms are returned.
        """
        analysis = self.cell(cell_dir)
        tested = tested_rows(analysis.best)
        if not tested or any(one.withheld is not None for one in tested):
            return [arm.name for arm in analysis.data.arms]
        return list(dict.fromkeys(arm for one in tested for arm in one.possibly_best))

    def _companion(self, cell_dir: StudyPath) -> CellAnalysis | None:
        """Return the same cell's analysis under the other isolation; None if it has no runs."""
        name = cell_dir.name
        interleaved = name.removesuffix(PROCESSES_SUFFIX)
        other = cell_dir.with_name(
            f"{name}{PROCESSES_SUFFIX}" if interleaved == name else interleaved
        )
        has_runs = is_cell(other) and any((other / "runs").glob("b*.json"))
        return self.cell(other) if has_runs else None


class Lazily(Sequence[T]):
    """A sequence whose elements are read from ``items`` each time that they are used."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any], T]) -> None:
        self.items, self._read = items, read

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self._read(self.items[index])


def cell_names(analyses: Sequence[CellAnalysis]) -> list[str]:
    """Return the names of a study's cells, without analysing those that are read lazily."""
    if not isinstance(analyses, Lazily):
        return [analysis.name for analysis in analyses]
    paths = ((cell, cell / "cell.json") for cell in analyses.items)
    known = ((cell, read_json(path) if path.is_file() else {}) for cell, path in paths)
    return [str(facts.get("cell", cell.name)) for cell, facts in known]


def _stamp(cell_dir: StudyPath) -> Stamp:
    """Return the names of a cell's runs and when they changed; empty for a cell in an archive."""
    if isinstance(cell_dir, ArchivePath):
        return frozenset()
    files = (cell_dir / "runs").glob("*.json")
    states = ((path.name, path.stat()) for path in files)
    return frozenset((name, facts.st_mtime_ns, facts.st_ctime_ns) for name, facts in states)


def undigested_note(study_dir: StudyPath, unlisted: int, records: int) -> str:
    """Return a warning about records of a study that have no digest."""
    return (
        f"{study_dir}: {unlisted} of {count_text(records, 'record')} have no digest (an older "
        "version of labkit wrote them), so a later edit would go unseen"
    )


def exit_code(study_dir: str | Path) -> int:
    """Return a study's exit code: 0 if all cells ran and every gate held, else 1.

    Raises ``RecordError`` if a cell's file is not valid.
    """
    cache = AnalysisCache(MAX_RECORDS)
    return max(cache.cell(path).status for path in cell_dirs(open_study(study_dir)))


def study_name(study_dir: StudyPath) -> str:
    """Return a study's name: its folder's, or its archive's without the suffix."""
    return study_dir.name if isinstance(study_dir, ArchivePath) else study_dir.resolve().name


def summarise_study(
    study_dir: StudyPath, cells: Sequence[CellSummary], known: Study | None = None
) -> Study:
    """Return the model of a study: the cells with their status, gates and verdicts.

    With several cells, ``family`` holds the p-values of all primary rows, adjusted as one family
    by max-T over joint relabellings and multiplied by the largest number of arms in any cell. If
    ``known`` has the same cells, its family is theirs.
    """
    entries = tuple(cell.entry for cell in cells)
    family = known.family if known is not None and known.cells == entries else None
    if family is None:
        family = tuple(study_family(cells)) if len(cells) > 1 else ()
    status = max(entry.status for entry in entries)
    machines = tuple(host_groups([entry.machine for entry in entries]))
    return Study(SCHEMA_VERSION, study_name(study_dir), status, machines, entries, family)


def study_family(cells: Sequence[CellSummary]) -> list[FamilyMember]:
    """Return the p-values of the primary rows of all cells, adjusted as one family.

    There is one entry per cell, row and arm. Cells in which nothing may be claimed yet are left
    out.
    """
    tested = [(cell.name, arm) for cell in cells for arm in cell.tested]
    most_arms = max(len(cell.findings.arms) for cell in cells)
    tests = Lazily([arm for _, arm in tested], lambda arm: list(arm.tests().values()))
    adjusted = joint_p_values(tests) if tested else []
    return [
        FamilyMember(name, case, metric, arm.arm, min(1.0, most_arms * p))
        for (name, arm), ps in zip(tested, adjusted, strict=True)
        for (case, metric), p in zip(arm.names, ps, strict=True)
    ]


def objective(analysis: CellAnalysis) -> float | None:
    """Return a cell's objective, or None if it has no measured value or a gate forbids a verdict.

    The objective is the effect of the first arm under test on the first primary metric, in percent.
    Without an arm under test, it is the baseline's median of this metric, in the metric's unit.
    Several cases are combined by the geometric mean (of ratios to the baseline, for an effect).
    """
    all_rows, arms = analysis.rows, analysis.data.treatment_arms
    primary = [i for i, row in enumerate(all_rows) if row.primary and row.skipped is None]
    metric = next((m for i in primary if (m := all_rows[i].metric) is not None), None)
    rows, baseline = [i for i in primary if all_rows[i].metric == metric], analysis.data.baseline
    judged = baseline, *arms[:1]
    if metric is None or any(analysis.causes(a, all_rows[i]) for i in rows for a in judged):
        return None
    if arms:
        effects = [analysis.comparisons[i][arms[0]].effect_pct for i in rows]
        ratio = _geometric_mean([None if one is None else 1 + one / 100 for one in effects])
        return None if ratio is None else 100 * (ratio - 1)
    return _geometric_mean([arm_values(all_rows[i].arms.get(baseline, [])).median for i in rows])


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean, or None if a value is absent or not positive."""
    positive = [value for value in values if value is not None and value > 0]
    return float(np.exp(np.mean(np.log(positive)))) if len(positive) == len(values) else None
