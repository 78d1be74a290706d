"""Changes between studies of the same machine and config.

The runs of two studies were not interleaved, so a change of the machine looks like a change of the
code. But both studies measured the baseline. So the test is whether an arm's difference from the
baseline changed (:mod:`.statistics.difference_in_differences`), corrected by the arm-blind machine
probe of each run's process. The baseline itself has nothing to be compared with: its medians are
shown, and nothing is claimed. Studies of different machines or configs are refused.
If the probe's time changed by more than the margin, a claim must exceed that change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from labkit.analysis.comparison import slow_kernel_launches
from labkit.analysis.comparison.arm_comparison import DecisionCriteria, interval_to_percent
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.observations import (
    MetricRow,
    arm_values,
    complete_blocks,
    log_values,
    run_probes,
)
from labkit.analysis.comparison.verdict import DECIDED_WORDS, NOISE_EXCEEDS_MARGIN, Verdict, judge
from labkit.analysis.findings.output_quality_sentences import quality_change_notes
from labkit.analysis.model.result_row import Comparison, row_name
from labkit.analysis.number_format import magnitude_text, p_text, percent_text, signed_text
from labkit.analysis.statistics.difference_in_differences import (
    EffectChange,
    StudyEffect,
    effect_change,
    estimate_effect,
)
from labkit.analysis.statistics.equivalence_test import Equivalence, equivalence_test
from labkit.analysis.statistics.hodges_lehmann import breakpoints, to_percent
from labkit.analysis.statistics.multiple_comparisons import holm, holm_levels
from labkit.analysis.statistics.permutation_test import Floats
from labkit.analysis.studies.study_analysis import cell_names
from labkit.config import count_text
from labkit.config.former_options import default_of, with_present_names
from labkit.records import machine_difference

STUDY_NAMES = ("old", "new")
NOT_COMPARABLE = "not_comparable"


class StudiesNotComparable(ValueError):
    """Two studies cannot be compared. The message is one line with the reason."""


@dataclass(frozen=True)
class RowChange:
    """One arm in one row of both studies: its old and new median, and the change with its verdict.

    ``name`` is the row's in its cell; ``place`` is the same after the cell's name, if several cells
    are compared. ``comparison`` describes the change of the arm's difference from the baseline. Its
    numbers are unknown for the baseline itself, and if there is no complete block.
    """

    cell: str
    name: str
    place: str
    row: MetricRow
    old: float | None
    new: float | None
    comparison: Comparison

    @property
    def arm(self) -> str:
        return self.comparison.arm


@dataclass(frozen=True)
class StudyComparison:
    """The changes in the primary rows, with caveats (shown above them) and notes (below them)."""

    changes: tuple[RowChange, ...]
    caveats: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def decidable(self) -> bool:
        """Whether any arm was compared in any row, and the studies are long and valid enough."""
        compared = [item.comparison for item in self.changes if item.comparison.p is not None]
        return any(one.verdict not in ("estimate_only", "invalid") for one in compared)


@dataclass(frozen=True)
class _CellPair:
    """One cell in both studies, checked to be comparable; without their records.

    ``prefix``: the cell's name before what is said of it; empty if no other cell is compared.
    ``metrics``: the primary metrics that either study measured. ``shift_pct`` is the change of the
    machine probe's time, or None if a study has no probe. ``with_stalls``: whether both studies are
    compared by times that include stalls, because an arm may have caused them in one of the
    studies. ``quality``: how the arms' quality changed.
    """

    name: str
    prefix: str
    metrics: frozenset[str | None]
    baseline: str
    criteria: DecisionCriteria
    shift_pct: float | None
    with_stalls: bool
    quality: tuple[str, ...]

    def row_name(self, row: MetricRow) -> str:
        return row_name(row, self.metrics)

    def place(self, row: MetricRow) -> str:
        """Return a row's name, after the cell's if several cells are compared."""
        return f"{self.prefix}{self.row_name(row)}"

    @property
    def machine_changed(self) -> bool:
        return self.shift_pct is not None and abs(self.shift_pct) > self.criteria.margin_pct

    @property
    def machine_change(self) -> str:
        return (
            f"the machine itself changed: the time of its arm-blind probe changed by "
            f"{signed_text(self.shift_pct or 0.0)} % "
            f"(margin ±{self.criteria.margin_pct:g} %); "
            "a smaller change of an arm is neither claimed nor ruled out"
        )


def may_have_stalled(*analyses: CellAnalysis) -> bool:
    """Return whether an arm may have caused stalls in one of the studies."""
    stalls = (analysis.data.stalls for analysis in analyses)
    return any(bool(one.kept_reason or one.unclear_reasons) for one in stalls if one is not None)


@dataclass(frozen=True)
class _ArmPair:
    """One arm in one row of both studies.

    ``causes``: why a gate forbids a verdict. ``change``: the change of the arm's difference from
    the baseline, or None if unknown. ``slow``: the launches that it leaves out, or None.
    """

    pair: _CellPair
    old: MetricRow
    new: MetricRow
    arm: str
    role: str
    causes: tuple[str, ...]
    change: _ArmChange | None = None
    slow: _SlowLaunches | None = None


@dataclass(frozen=True)
class _ArmChange:
    """A change and the samples from which its 100,000 values are computed again when needed."""

    old: ArmSample
    new: ArmSample
    p: float
    estimate: float
    exact: bool
    count: int

    @classmethod
    def of(cls, old: ArmSample, new: ArmSample) -> _ArmChange:
        one = effect_change(old.effect(), new.effect())
        return cls(old, new, one.p, one.estimate, one.exact, one.count)

    @property
    def blocks(self) -> int:
        """The smaller number of blocks."""
        return min(len(self.old.baseline), len(self.new.baseline))

    def effect(self) -> EffectChange:
        """Return the change with its null distribution."""
        return effect_change(self.old.effect(), self.new.effect())


@dataclass(frozen=True)
class _SlowLaunches:
    """The smaller p of slow launches, its study, and both studies by the means of all launches."""

    p: float
    study: str
    means: list[ArmSample]


def compare_with_first(
    old: Sequence[CellAnalysis], later: Sequence[Sequence[CellAnalysis]], margin_pct: float
) -> list[StudyComparison]:
    """Compare each of the ``later`` studies with ``old``, row by row and arm by arm.

    p-values are adjusted over all rows, arms and studies by the method of S. Holm (1979). Raises
    ``StudiesNotComparable`` if the machines or configs differ, or there is no cell or row in
    common.
    """
    matched = [_match_studies(old, new, margin_pct) for new in later]
    family = [item for one in matched for item in one.family]
    adjusted = dict(zip(map(id, family), _compare_family(family), strict=True))
    return [_conclude(one, adjusted, family) for one in matched]


@dataclass(frozen=True)
class _MatchedStudies:
    """The cells and rows that two studies share, and the caveats on their comparison."""

    pairs: Sequence[_CellPair]
    compared: Sequence[_ArmPair]
    caveats: Sequence[str]

    @property
    def family(self) -> list[_ArmPair]:
        """The arms under test whose change is known."""
        return [item for item in self.compared if item.role == "arm" and item.change is not None]


def _match_studies(
    old: Sequence[CellAnalysis], new: Sequence[CellAnalysis], margin_pct: float
) -> _MatchedStudies:
    shared, caveats = _shared_cells(old, new)
    pairs: list[_CellPair] = []
    compared: list[_ArmPair] = []
    for places in shared:  # only the two cells are in memory, if the studies are read lazily
        cells = old[places[0]], new[places[1]]
        pair = _cell_pair(*cells, margin_pct, len(shared) > 1)
        pairs.append(pair)
        if pair.shift_pct is None:
            caveats.append(
                f"{pair.name}: the probe is missing, so a change of the machine would go undetected"
            )
        elif pair.machine_changed:
            caveats.append(f"{pair.name}: {pair.machine_change}")
        caveats += _unshared_rows(pair, cells)
        if pair.with_stalls:
            caveats.append(
                f"{pair.name}: times include apparent stalls of the machine: "
                "in one of the studies they may be an arm's own work"
            )
        compared += _shared_rows(pair, *cells)
    if not compared:
        raise StudiesNotComparable("the studies measured no row in common as a primary one")
    return _MatchedStudies(pairs, compared, caveats)


def _conclude(
    matched: _MatchedStudies, comparisons: Mapping[int, Comparison], family: Sequence[_ArmPair]
) -> StudyComparison:
    """Return two studies' comparison. ``family``: all changes over which p-values are adjusted."""
    compared = matched.compared
    controls = [item for item in compared if item.role == "control" and item.change is not None]
    noise = {(one.pair.name, one.old.case, one.old.metric): (one, _noise(one)) for one in controls}
    changes = []
    for item in (item for item in compared if item.role != "control"):
        pair, row, comparison = item.pair, item.old, comparisons.get(id(item))
        before, after = (arm_values(one.arms.get(item.arm, ())).median for one in (row, item.new))
        control = noise.get((pair.name, row.case, row.metric))
        verdict = _judge(item, comparison, control, family)
        known = comparison or Comparison(item.arm, pair.baseline)
        told = replace(known, verdict=verdict.word, reason=verdict.reason)
        names = pair.name, pair.row_name(row), pair.place(row)
        changes.append(RowChange(*names, row, before, after, told))
    method = _method_notes(matched.pairs, family if matched.family else [], controls)
    quality = [f"{pair.prefix}{note}" for pair in matched.pairs for note in pair.quality]
    notes = (*_undecided_note(changes), *quality, *method)
    return StudyComparison(tuple(changes), tuple(matched.caveats), notes)


def _noise(control: _ArmPair) -> Comparison:
    """Compare a control's change; its p is not adjusted, because it only shows the noise."""
    assert control.change is not None
    return _comparison(control, control.change.p, control.pair.criteria.alpha, 1)


def _undecided_note(changes: Sequence[RowChange]) -> Iterator[str]:
    """Yield a note on the undecided rows, if any: how many, and the change each could detect."""
    undecided = [item for item in changes if item.comparison.verdict == "inconclusive"]
    detectable = [
        (mde_pct, f"{item.place}, {item.arm}")
        for item in undecided
        if (mde_pct := item.comparison.mde_pct) is not None
    ]
    if detectable:
        (low, low_row), (high, high_row) = min(detectable), max(detectable)
        noun = "row" if len({item.arm for item in undecided}) == 1 else "comparison"
        text = f"Not decided in {count_text(len(detectable), noun)}: the smallest "
        text += f"detectable change is {magnitude_text(low)} % ({low_row})"
        if len(detectable) > 1:
            text += f" to {magnitude_text(high)} % ({high_row})"
        yield f"{text}."


def _method_notes(
    pairs: Sequence[_CellPair], family: Sequence[_ArmPair], controls: Sequence[_ArmPair]
) -> Iterator[str]:
    names = list(dict.fromkeys(pair.baseline for pair in pairs))
    if not family:
        yield (
            "Nothing can be compared: the studies have no arm besides the baseline, and the "
            "machine itself changes from hour to hour. Make the two versions arms of one study."
        )
        return
    draws = {item.change.count for item in family if item.change and not item.change.exact}
    how = f"Monte Carlo, {max(draws):,} draws" if draws else "all relabellings"
    yield (
        f"Change: how each arm's difference from {' or '.join(names)} changed from old to new "
        "(difference in differences: what slows a whole study cancels out). p: permutation test "
        f"that relabels both studies within their blocks ({how}), adjusted over "
        f"{count_text(len(family), 'comparison')} (Holm); each interval has the level at which "
        "its row was tested."
    )
    known = ((item.change, item.pair.place(item.old)) for item in controls)
    if changes := [(change, place) for change, place in known if change is not None]:
        worst, worst_row = max(changes, key=lambda one: abs(one[0].estimate))
        least, least_row = min(changes, key=lambda one: one[0].p)
        yield (
            f"A/A control: its difference from the baseline changed by at most "
            f"{percent_text(to_percent(worst.estimate))} ({worst_row}); smallest p "
            f"{p_text(least.p)} ({least_row}), unadjusted."
        )


def _compare_family(items: Sequence[_ArmPair]) -> list[Comparison]:
    """Compare the changes of all rows and arms as one family.

    p-values are adjusted by the method of S. Holm (1979). Each interval is at the level at which
    Holm's method tests that row, so it excludes 0 if and only if "no change" is rejected.
    Equivalence and the smallest detectable change use the level of the first step (C. E.
    Bonferroni).
    """
    return [_comparison(*test, len(items)) for test in _holm_tests(items)]


def _holm_tests(items: Sequence[_ArmPair]) -> Iterator[tuple[_ArmPair, float, float]]:
    """Yield each item of a family with its adjusted p and the level at which it is tested."""
    ps = [item.change.p for item in items if item.change is not None]
    levels = {alpha: holm_levels(ps, alpha) for alpha in {one.pair.criteria.alpha for one in items}}
    for i, (item, adjusted) in enumerate(zip(items, holm(ps), strict=True)):
        yield item, adjusted, levels[item.pair.criteria.alpha][i]


def _comparison(item: _ArmPair, adjusted: float, level: float, size: int) -> Comparison:
    assert item.change is not None
    change, criteria = item.change.effect(), item.pair.criteria
    points = breakpoints(change.null_distribution, change.label_correlation)
    low, high = interval_to_percent(points.interval(level)) or (None, None)
    raw = interval_to_percent(points.interval(criteria.alpha)) or (None, None)
    equal = equivalence_test(points, criteria.margin_pct, criteria.alpha / size)
    return Comparison(
        arm=item.arm,
        baseline=item.pair.baseline,
        effect_pct=to_percent(change.estimate),
        ci_low_pct=low,
        ci_high_pct=high,
        ci_raw_low_pct=raw[0],
        ci_raw_high_pct=raw[1],
        level=1.0 - criteria.alpha,
        p=item.change.p,
        p_adjusted=adjusted,
        p_floor=min(1.0, size * change.smallest_p),
        mde_pct=change.mde_pct(criteria.alpha / size),
        blocks=item.change.blocks,
        equivalence=Equivalence(min(1.0, size * equal.p), equal.bound_pct),
    )


def _judge(
    item: _ArmPair,
    comparison: Comparison | None,
    control: tuple[_ArmPair, Comparison] | None,
    family: Sequence[_ArmPair],
) -> Verdict:
    pair = item.pair
    if item.causes:
        return Verdict("invalid", "; ".join(item.causes))
    if item.role == "baseline":
        return Verdict(NOT_COMPARABLE, "the baseline has nothing to be compared with")
    if comparison is None:
        return Verdict(
            NOT_COMPARABLE, "the studies do not both have a complete block with values above 0"
        )
    verdict = judge(comparison, item.old.better, pair.criteria, (), control and control[1])
    if verdict.word == "inconclusive" and verdict.reason != NOISE_EXCEEDS_MARGIN:
        return Verdict("inconclusive")  # a note gives the detectable change of all such rows
    verdict = _beyond_machine_change(verdict, comparison, pair)
    if verdict.word in DECIDED_WORDS and item.slow is not None:
        return _restrict(verdict, item, item.slow, control and control[0], family)
    return verdict


def _restrict(
    verdict: Verdict,
    item: _ArmPair,
    slow: _SlowLaunches,
    control: _ArmPair | None,
    family: Sequence[_ArmPair],
) -> Verdict:
    """Return a verdict that is decided, or ``inconclusive`` if slow launches contradict it."""
    typical, mean = item.change, _ArmChange.of(*slow.means)
    assert typical is not None

    def by_mean() -> Verdict:
        of_mean, noise = replace(item, change=mean), None
        tests = _holm_tests([of_mean if one is item else one for one in family])
        comparison = next(_comparison(*test, len(family)) for test in tests if test[0] is of_mean)
        if control is not None:
            means = control.slow and _ArmChange.of(*control.slow.means)
            noise = _noise(replace(control, change=means or control.change))
        verdict = judge(comparison, item.old.better, item.pair.criteria, (), noise)
        return _beyond_machine_change(verdict, comparison, item.pair)

    effects = to_percent(typical.estimate), to_percent(mean.estimate)
    arm = f"{item.arm} in the {slow.study} study"
    return slow_kernel_launches.restrict(verdict, arm, slow.p, effects, by_mean, "change")


def _beyond_machine_change(verdict: Verdict, comparison: Comparison, pair: _CellPair) -> Verdict:
    """Return ``verdict``, or ``inconclusive`` if the machine's change could explain an arm's.

    The arm and the baseline may depend on different parts of the machine. In the worst case the
    machine's change affects the arm in full and the baseline not at all. So an arm's change counts
    only if its whole interval is further from 0 than the change of the probe.
    """
    if verdict.word not in DECIDED_WORDS or not pair.machine_changed:
        return verdict
    beyond = min(map(abs, comparison.ci_pct or (0.0,))) > abs(pair.shift_pct or 0.0)
    return verdict if beyond else Verdict("inconclusive", pair.machine_change)


def _cell_pair(old: CellAnalysis, new: CellAnalysis, margin_pct: float, several: bool) -> _CellPair:
    _refuse_machine(old, new)
    _refuse_config(old, new)
    both = old.data, new.data
    alpha, runs = min(map(_alpha, (old, new))), min(d.criteria.runs for d in both)
    withheld = zip(STUDY_NAMES, (d.withheld_reason for d in both), strict=True)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in withheld if reason is not None)
    criteria = DecisionCriteria(runs, alpha, margin_pct, reasons or None)
    return _CellPair(
        old.name,
        f"{old.name}: " if several else "",
        frozenset(row.metric for a in (old, new) for row in a.rows if _is_measured(row)),
        old.data.baseline,
        criteria,
        probe_shift_pct(old, new),
        may_have_stalled(old, new),
        tuple(quality_change_notes(old.data, new.data)),
    )


def _alpha(analysis: CellAnalysis) -> float:
    """Return the smallest alpha at which a study decided a primary row; a look may spend less."""
    data = analysis.data
    alphas = (data.criteria_of(row.case).alpha for row in analysis.rows if _is_measured(row))
    return min(filter(None, alphas), default=data.design.alpha)  # it is 0 while none may be claimed


def _shared_cells(
    old: Sequence[CellAnalysis], new: Sequence[CellAnalysis]
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the indices of each shared cell in both studies, and a caveat on each other cell."""
    if len(old) == len(new) == 1:
        return [(0, 0)], []
    before, after = ({name: i for i, name in enumerate(cell_names(s))} for s in (old, new))
    shared = [name for name in before if name in after]
    if not shared:
        raise StudiesNotComparable("the studies have no cell in common")
    sides = zip(STUDY_NAMES, (before, after), (after, before), strict=True)
    alone = [f"{n} is only in {s}" for s, own, other in sides for n in own if n not in other]
    return [(before[name], after[name]) for name in shared], alone


def _refuse_machine(old_cell: CellAnalysis, new_cell: CellAnalysis) -> None:
    """Raise :class:`StudiesNotComparable` if two runs are from different kinds of machine.

    Blocks of several hosts of the same kind (``design.across_hosts=true``) are allowed, because
    both studies are relabelled within their blocks and every block ran on a single host.
    """
    old = old_cell.environment
    for record in (*old_cell.data.records, *new_cell.data.records):
        new = record.environment or old
        field = machine_difference(old, new)
        if field is not None:
            raise StudiesNotComparable(
                f"{old_cell.name}: the studies ran on different kinds of machines: {field} was "
                f"{old.get(field)}, now {new.get(field)}"
            )


def _refuse_config(old_cell: CellAnalysis, new_cell: CellAnalysis) -> None:
    kinds = [analysis.data.design.isolation for analysis in (old_cell, new_cell)]
    if kinds[0] != kinds[1]:
        raise StudiesNotComparable(
            f"{old_cell.name}: the studies have different designs: design.isolation was "
            f"{kinds[0]}, now {kinds[1]}"
        )
    baselines = [analysis.data.baseline for analysis in (old_cell, new_cell)]
    if baselines[0] != baselines[1]:
        raise StudiesNotComparable(
            f"{old_cell.name}: the baseline was {baselines[0]}, now {baselines[1]}"
        )
    arms = [{a.name: a for a in analysis.data.arms} for analysis in (old_cell, new_cell)]
    if set(arms[0]) != set(arms[1]):
        alone = ", ".join(sorted(set(arms[0]) ^ set(arms[1])))
        raise StudiesNotComparable(
            f"{old_cell.name}: the studies have different arms: only one of them has {alone}"
        )
    for name in arms[0]:
        old, new = arms[0][name], arms[1][name]
        configs = with_present_names(old.config), with_present_names(new.config)
        difference = _difference(*configs) or _changed_input(old.inputs, new.inputs)
        if difference is not None:
            raise StudiesNotComparable(
                f"{old_cell.name}: the configs of arm {name} differ: {difference}"
            )


def _changed_input(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """Return the first data file whose digest differs. Code may differ, as labkit's own may."""
    shared = (key for key in old if key in new and not key.endswith(".py"))
    changed = next((key for key in shared if old[key] != new[key]), None)
    return changed and f"the SHA-256 of the file of {changed} was {old[changed]}..., now another"


def _difference(old: Any, new: Any, where: str = "") -> str | None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            place = f"{where}.{key}".lstrip(".")
            before, after = (side.get(key, ...) for side in (old, new))
            group = isinstance(before, Mapping) or isinstance(after, Mapping)
            absent = {} if group else default_of(place)  # one of the versions lacks it
            before, after = (absent if side is ... else side for side in (before, after))
            difference = _difference(before, after, place)
            if difference is not None:
                return difference
        return None
    return None if old == new else f"{where} was {old}, now {new}"


def probe_shift_pct(old_cell: CellAnalysis, new_cell: CellAnalysis) -> float | None:
    """Return the change of the probe's median time from the old study to the new, in percent.

    None if a study has no probe.
    """
    probes = [list(a.data.probe.values()) for a in (old_cell, new_cell)]
    if not all(probes):
        return None
    return to_percent(float(np.median(probes[1]) - np.median(probes[0])))


def _is_measured(row: MetricRow) -> bool:
    return row.primary and row.skipped is None


def _row_key(row: MetricRow) -> tuple[str | None, ...]:
    return row.case, row.metric, row.unit, row.better


def _unshared_rows(pair: _CellPair, analyses: tuple[CellAnalysis, CellAnalysis]) -> Iterator[str]:
    old, new = ({_row_key(r): r for r in a.rows if r.skipped is None} for a in analyses)
    for name, rows, others in zip(STUDY_NAMES, (old, new), (new, old), strict=True):
        named_alike = {key[:2] for key in others}
        for key, row in rows.items():
            other = others.get(key)
            if not row.primary or (other is not None and other.primary):
                continue
            other_unit = other is None and key[:2] in named_alike
            unit = f" in {row.unit} ({row.better} is better)" if other_unit else ""
            primary = "" if other is None else "primary "
            yield f"{pair.name}: {pair.row_name(row)}{unit} is {primary}only in {name}"


def _shared_rows(pair: _CellPair, old: CellAnalysis, new: CellAnalysis) -> Iterator[_ArmPair]:
    studies = old, new
    before, after = (one.rows_by_stalls(included=pair.with_stalls) for one in studies)
    places = {_row_key(row): place for place, row in enumerate(after)}
    for index, row in enumerate(before):
        place = places.get(_row_key(row))
        if place is None or not (_is_measured(row) and _is_measured(after[place])):
            continue
        match = after[place]
        for arm in old.data.arms:
            change, slow = None, None
            if arm.role != "baseline":
                samples = arm_sample(old, row, arm.name), arm_sample(new, match, arm.name)
                if samples[0] is not None and samples[1] is not None:
                    change = _ArmChange.of(samples[0], samples[1])
                    indices = (old, index, samples[0]), (new, place, samples[1])
                    slow = _slow_launches(arm.name, *indices)
            causes = tuple(
                f"{name}: {cause}"
                for name, analysis in zip(STUDY_NAMES, studies, strict=True)
                for cause in analysis.causes(arm.name, row)
            )
            yield _ArmPair(pair, row, match, arm.name, arm.role, causes, change, slow)


def _slow_launches(arm: str, *studies: tuple[CellAnalysis, int, ArmSample]) -> _SlowLaunches | None:
    """Return an arm's slow launches in a row; None if neither study timed single launches.

    A study is given with the row's index and the arm's sample, which stands for the mean launch of
    a study that did not.
    """
    ps, means = [], []
    for name, (analysis, index, sample) in zip(STUDY_NAMES, studies, strict=True):
        p = analysis.slow_launch_p(index, arm)
        mean = None if p is None else arm_sample(analysis, analysis.alternative_rows[index], arm)
        if p is not None and mean is not None:
            ps.append((p, name))
        means.append(mean or sample)
    return _SlowLaunches(*min(ps), means) if ps else None


@dataclass(frozen=True)
class ArmSample:
    """The log values of a baseline and an arm in one study, float64 [blocks, runs].

    ``probes``: the log probes of their runs, or None if a run has no probe.
    """

    baseline: Floats
    arm: Floats
    probes: tuple[Floats, Floats] | None

    def effect(self) -> StudyEffect:
        return estimate_effect(self.baseline, self.arm, self.probes)


def arm_sample(analysis: CellAnalysis, row: MetricRow, arm: str) -> ArmSample | None:
    """Return an arm's values in the complete blocks of one study.

    None if no block is complete or a value is not above 0.
    """
    data = analysis.data
    pair = (data.baseline, arm)
    row = row.pair(*pair)
    blocks = complete_blocks(row, pair, data.criteria.runs)
    if not blocks or not row.positive:
        return None
    base, other = (log_values(row, name, blocks) for name in pair)
    probes = run_probes(data.probe, row, pair, blocks)
    return ArmSample(base, other, None if probes is None else (probes[0], probes[1]))
