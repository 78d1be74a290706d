"""Analysis of a study: its cells, their analyses, and p-values adjusted over all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.analysis.comparison.arm_comparison import row_tests
from labkit.analysis.comparison.best_setting import is_decided
from labkit.analysis.comparison.cell_analysis import CellAnalysis, analyse
from labkit.analysis.comparison.observations import arm_values
from labkit.analysis.comparison.text_quality import limits_decided
from labkit.analysis.comparison.verdict import DECIDED_WORDS
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.long_text import long_text
from labkit.analysis.model.study_model import CellEntry, FamilyMember, Study
from labkit.analysis.number_format import interval_text, percent_text
from labkit.analysis.robustness.host_groups import host_groups, machine_name
from labkit.analysis.statistics.block_jackknife import LOOK_CONFIDENCE
from labkit.analysis.statistics.multiple_comparisons import joint_p_values
from labkit.config import count_text
from labkit.config.sweep import short_names
from labkit.records import (
    PROCESSES_SUFFIX,
    SCHEMA_VERSION,
    ArchivePath,
    Record,
    RecordError,
    StudyPath,
    name_order,
    open_study,
)

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis

Stamp = frozenset[tuple[str, int]]


class AnalysisCache:
    """Cache of cell analyses; a cell is analysed again only if its runs have changed."""

    def __init__(self) -> None:
        self._known: dict[StudyPath, tuple[Stamp, CellAnalysis]] = {}

    def cell(self, cell_dir: StudyPath) -> CellAnalysis:
        """Return a cell's analysis, from the cache unless its runs have changed.

        Raises :class:`RecordError` if a file of the cell is not valid.
        """
        stamp, known = _stamp(cell_dir), self._known.get(cell_dir)
        if known is not None and known[0] == stamp:
            return known[1]
        analysis = analyse(cell_dir, lambda: self._companion(cell_dir))
        self._known[cell_dir] = stamp, analysis
        return analysis

    def study(self, study_dir: StudyPath) -> list[CellAnalysis]:
        """Return the analyses of a study's cells; raise :class:`RecordError` for a bad file."""
        return [self.cell(path) for path in cell_dirs(study_dir)]

    def undecided_cases(self, cell_dir: StudyPath) -> list[str]:
        """Return the cases with a primary row in which a treatment arm has no decided verdict.

        Arms that claim to run out of memory are left out. In a sweep all cases are undecided until
        only one setting may be the best in every primary row. With ``workload.capacity`` all are
        undecided until every arm is shown to keep its target share, or to miss it.
        """
        from labkit.analysis.studies.serving_capacity import rate_is_decided  # it needs this module

        analysis = self.cell(cell_dir)
        primary = [row.case for row in analysis.rows if row.primary]
        if analysis.data.sweep:
            return [] if is_decided(analysis.best) else primary
        if rate_is_decided(analysis) is False:
            return primary
        claimed = {arm.name for arm in analysis.data.arms if arm.out_of_memory}
        arms = set(analysis.data.treatment_arms) - claimed
        judged = [one for one in analysis.judged if one.row.primary and one.comparison.arm in arms]
        if not judged:  # a baseline alone has nothing to decide but its capacity
            return [] if rate_is_decided(analysis) else primary
        decided = DECIDED_WORDS | {"computed"}
        return [one.row.case for one in judged if one.verdict.word not in decided]

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
                "row": row.name,
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
        """Return a cell's objective; see :mod:`labkit.analysis.studies.study_analysis`."""
        return objective(self.cell(cell_dir))

    def notes(self) -> list[str]:
        """Return a line for each study read so far that has records without a digest."""
        counts: dict[StudyPath, tuple[int, int]] = {}
        for cell_dir, (_, analysis) in self._known.items():
            unlisted, records = counts.get(cell_dir.parent, (0, 0))
            data = analysis.data
            counts[cell_dir.parent] = unlisted + data.unlisted, records + len(data.records)
        return [undigested_note(study, *count) for study, count in counts.items() if count[0]]

    def possibly_best(self, cell_dir: Path) -> list[str]:
        """Return the arms of a sweep that may be the best in some primary row.

        If nothing may be claimed in some row yet, all arms are returned.
        """
        analysis = self.cell(cell_dir)
        if any(one.withheld is not None for one in analysis.best):
            return [arm.name for arm in analysis.data.arms]
        return list(dict.fromkeys(arm for one in analysis.best for arm in one.possibly_best))

    def _companion(self, cell_dir: StudyPath) -> CellAnalysis | None:
        """Return the same cell's analysis under the other isolation, or None if it has no runs.

        If this cell's arms are interleaved, the other cell has separate processes, and vice versa.
        """
        name = cell_dir.name
        interleaved = name.removesuffix(PROCESSES_SUFFIX)
        other = cell_dir.with_name(
            f"{name}{PROCESSES_SUFFIX}" if interleaved == name else interleaved
        )
        has_runs = is_cell(other) and any((other / "runs").glob("b*.json"))
        return self.cell(other) if has_runs else None


def _stamp(cell_dir: StudyPath) -> Stamp:
    """Return the names and modification times of a cell's runs; empty for a cell in an archive."""
    if isinstance(cell_dir, ArchivePath):
        return frozenset()
    files = (cell_dir / "runs").glob("*.json")
    return frozenset((path.name, path.stat().st_mtime_ns) for path in files)


def undigested_note(study_dir: StudyPath, unlisted: int, records: int) -> str:
    """Return a warning about records of a study that have no digest."""
    return (
        f"{study_dir}: {unlisted} of {count_text(records, 'record')} have no digest (an older "
        "version of labkit wrote them), so a later edit would go unseen"
    )


def is_cell(folder: StudyPath) -> bool:
    """Return whether a folder is a cell.

    A cell has a ``cell.json``, or the arms and runs from which it can be rebuilt.
    """
    if (folder / "cell.json").is_file():
        return True
    return any((folder / "arms").glob("*.json")) and any((folder / "runs").glob("b*.json"))


def cell_dirs(study_dir: StudyPath) -> list[StudyPath]:
    """Return a study's cell folders, sorted by name; numbers in names are sorted by size.

    If ``study_dir`` is itself a cell, the list holds only that folder. Raises ``RecordError`` if
    the folder does not exist, or contains no cell.
    """
    if not study_dir.is_dir():
        raise RecordError(f"{study_dir}: no such directory")
    if is_cell(study_dir):
        return [study_dir]
    cells = [path for path in study_dir.iterdir() if is_cell(path)]
    if not cells:
        raise RecordError(f"{study_dir} has no cell (a folder with arms/ and runs/)")
    return sorted(cells, key=lambda path: name_order(path.name))


def exit_code(study_dir: str | Path) -> int:
    """Return a study's exit code: 0 if all cells ran and every gate held, else 1.

    Raises ``RecordError`` if a cell's file is not valid.
    """
    return max(analysis.status for analysis in AnalysisCache().study(open_study(study_dir)))


def study_name(study_dir: StudyPath) -> str:
    """Return a study's name: its folder's, or its archive's without the suffix."""
    return study_dir.name if isinstance(study_dir, ArchivePath) else study_dir.resolve().name


def summarise_study(study_dir: StudyPath, analyses: Sequence[CellAnalysis]) -> Study:
    """Return the model of a study: the cells with their status, gates and verdicts.

    With several cells, ``family`` holds the p-values of all primary rows, adjusted as one family
    by max-T over joint relabellings and multiplied by the largest number of arms in any cell.
    """
    return Study(
        SCHEMA_VERSION,
        study_name(study_dir),
        max(analysis.status for analysis in analyses),
        tuple(machine.name for machine in host_groups(analyses)),
        tuple(map(_entry, analyses)),
        tuple(study_family(analyses) if len(analyses) > 1 else ()),
    )


def _entry(analysis: CellAnalysis) -> CellEntry:
    cell, data = analysis.cell, analysis.data
    arms = set(cell.treatment_arms)
    comparisons = (one for row in cell.primary_rows for one in row.comparisons)
    return CellEntry(
        cell=cell.cell,
        dir=data.dir.name,
        machine=machine_name(analysis),
        question=cell.question,
        answer=long_text(plan_findings(analysis)),
        status=analysis.status,
        complete=data.complete,
        blocks=len(data.blocks_done),
        runs=len(data.records),
        failures=len(cell.failures),
        gates={name: gate.status for name, gate in cell.gates.items()},
        verdicts=dict(Counter(one.verdict for one in comparisons if one.arm in arms)),
    )


def study_family(analyses: Sequence[CellAnalysis]) -> list[FamilyMember]:
    """Return the p-values of the primary rows of all cells, adjusted as one family.

    There is one entry per cell, row and arm. Cells in which nothing may be claimed yet are left
    out.
    """
    tested, families = [], []
    most_arms = max(len(analysis.data.treatment_arms) for analysis in analyses)
    for analysis in analyses:
        data = analysis.data
        for arm in data.treatment_arms if data.withheld_reason is None else ():
            tests = row_tests(analysis.rows, arm, data.baseline, data.criteria.runs, True)
            if tests:
                tested.append((analysis, arm, list(tests)))
                families.append(list(tests.values()))
    adjusted = joint_p_values(families) if families else []
    return [
        FamilyMember(analysis.name, row.case, row.metric, arm, min(1.0, most_arms * p))
        for (analysis, arm, members), ps in zip(tested, adjusted, strict=True)
        for row, p in zip((analysis.rows[member] for member in members), ps, strict=True)
    ]


def objective(analysis: CellAnalysis) -> float | None:
    """Return a cell's objective, or None if it has no measured value.

    The objective is the effect of the first arm under test on the first primary metric, in percent.
    Without an arm under test, it is the baseline's median of this metric, in the metric's unit.
    Several cases are combined by the geometric mean (of ratios to the baseline, for an effect).
    """
    primary = [
        index
        for index, row in enumerate(analysis.rows)
        if row.primary and row.skipped is None and row.metric is not None
    ]
    if not primary:
        return None
    metric = analysis.rows[primary[0]].metric
    rows = [index for index in primary if analysis.rows[index].metric == metric]
    arms = analysis.data.treatment_arms
    if arms:
        effects = [analysis.comparisons[index][arms[0]].effect_pct for index in rows]
        ratios = [None if effect is None else 1 + effect / 100 for effect in effects]
        ratio = _geometric_mean(ratios)
        return None if ratio is None else 100 * (ratio - 1)
    baseline = analysis.data.baseline
    return _geometric_mean(
        [arm_values(analysis.rows[index].arms.get(baseline, [])).median for index in rows]
    )


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean, or None if a value is absent or not positive."""
    positive = [value for value in values if value is not None and value > 0]
    return float(np.exp(np.mean(np.log(positive)))) if len(positive) == len(values) else None


def cell_labels(analyses: Sequence[CellAnalysis], ignore: Collection[str] = ()) -> list[str]:
    """Return a label for each cell, such as ``rate=2``, without the options in ``ignore``.

    If there is only one cell, its label has all its overrides. A cell of an earlier version of
    labkit, which did not list the overrides, is labelled by its name.
    """
    listed = [
        [override for override in _overrides(analysis) if override.partition("=")[0] not in ignore]
        for analysis in analyses
    ]
    if len(analyses) == 1:
        return [", ".join(listed[0]) or analyses[0].name]
    common = set.intersection(*map(set, listed))
    varying = [[o for o in overrides if o not in common] for overrides in listed]
    keys = dict.fromkeys(o.partition("=")[0] for overrides in varying for o in overrides)
    short = short_names(list(keys))
    return [
        _label(overrides, short, analysis)
        for overrides, analysis in zip(varying, analyses, strict=True)
    ]


def _overrides(analysis: CellAnalysis) -> list[str]:
    return list(analysis.data.manifest.get("overrides") or [analysis.name])


def _label(overrides: Sequence[str], short: dict[str, str], analysis: CellAnalysis) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{short[key]}{equals}{value}" for key, equals, value in pairs]
    if analysis.data.dir.name.endswith(PROCESSES_SUFFIX):
        words.append("in separate processes")
    return ", ".join(words) or "as configured"
