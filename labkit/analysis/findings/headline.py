"""The headline: the answer to a cell's question in one sentence, the same in every format.

If the question is about outputs, the headline first says whether they are as claimed. Then follow
the decided effects and their sizes, the undecided rows with their smallest detectable effects, the
computed values, and the quality of arms that score texts. Effects come only from verdicts, so an
inconclusive row is given no direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.analysis.comparison.arm_comparison import ArmComparison
from labkit.analysis.comparison.best_setting import best_sentence
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.observations import MetricRow, summary
from labkit.analysis.comparison.verdict import Verdict
from labkit.analysis.findings.effect_wording import (
    change_word,
    effect_text,
    has_own_size,
    size_text,
    value_with_unit,
)
from labkit.analysis.findings.frames_answer import frames_sentences
from labkit.analysis.findings.outputs_answer import outputs_answer
from labkit.analysis.findings.quality_answer import quality_sentences
from labkit.analysis.number_format import join_names, magnitude_text, percent_text
from labkit.config import count_text
from labkit.records.metric_registry import OUTPUTS, MetricDefinition, define_metric

MAX_NAMED_ROWS = 3  # if there are more rows, their number and the extremes are given
CHANGED_WORDS = ("faster", "slower")
UNCHANGED_WORDS = ("equivalent", "trivial")
UNDECIDED_WORDS = ("inconclusive", "estimate_only")


@dataclass(frozen=True)
class _RowVerdict:
    """The verdict on one arm in one primary row; ``name`` is the row's name."""

    name: str
    row: MetricRow
    comparison: ArmComparison
    verdict: Verdict

    @property
    def effect(self) -> float:
        return self.comparison.effect_pct or 0.0

    @property
    def bound(self) -> float:
        """The interval limit that is further from 0, as an absolute value in percent."""
        return max(map(abs, self.comparison.ci_pct or (self.effect,)))

    @property
    def definition(self) -> MetricDefinition:
        """The definition of the row's metric."""
        return define_metric(self.row.metric, self.row.unit)

    @property
    def baseline(self) -> float | None:
        """The baseline's median in this row, or None if it has no values."""
        return self.median(self.comparison.baseline)

    @property
    def is_computed(self) -> bool:
        """Whether the row has computed values, even if this arm has no value in it."""
        return self.verdict.word == "computed" or (
            self.row.is_computed and self.median(self.comparison.arm) is None
        )

    @property
    def word(self) -> str:
        """The word for the direction of the effect: ``faster``, ``lower``, ``more``."""
        row = self.row
        return change_word(row.metric, row.unit, row.better, self.effect > 0)

    @property
    def effect_text(self) -> str:
        """The effect as text: ``2.1 % faster``, ``12.0 ms (5.1 %) lower``."""
        row = self.row
        return effect_text(row.metric, row.unit, row.better, self.effect, self.baseline)

    @property
    def own_size(self) -> float | None:
        """The effect in the metric's unit, or None if it is given in percent alone."""
        if self.baseline is None or not has_own_size(self.row.metric, self.row.unit):
            return None
        return self.baseline * self.effect / 100

    def median(self, arm: str) -> float | None:
        """Return the median of an arm's runs in this row, or None if it has no values."""
        median: float | None = summary(self.row.arms.get(arm, ()))["median"]
        return median


def headline(analysis: CellAnalysis) -> str:
    """Return a cell's headline, from the verdicts on its primary rows."""
    arms = analysis.data.treatment_arms
    if analysis.data.sweep:
        return best_sentence(analysis.json)
    if not arms:
        return _no_arms(analysis)
    by_arm = {arm: _row_verdicts(analysis, arm) for arm in arms}
    sentences = [outputs_answer(analysis)] if OUTPUTS in analysis.data.metrics else []
    measured, computed = _by_noise(by_arm)
    if any(measured.values()) or not (sentences or any(computed.values())):
        sentences.append(_measured_sentence(analysis, measured))
    sentences += _computed_sentences(computed, analysis.data.baseline)
    sentences += quality_sentences(analysis.data)
    sentences += frames_sentences(analysis.data)
    return " ".join(sentences)


Results = dict[str, list["_RowVerdict"]]


def _by_noise(by_arm: Results) -> tuple[Results, Results]:
    """Return the verdicts on measured rows and those on computed rows, each by arm."""
    measured, computed = (
        {
            arm: [r for r in results if r.is_computed is is_computed]
            for arm, results in by_arm.items()
        }
        for is_computed in (False, True)
    )
    return measured, computed


def _measured_sentence(analysis: CellAnalysis, by_arm: Results) -> str:
    """Return the sentence on the rows with measured values."""
    arms, baseline = analysis.data.treatment_arms, analysis.data.baseline
    all_results = [result for results in by_arm.values() for result in results]
    words = {result.verdict.word for result in all_results}
    missing = _not_measured(analysis)
    if not all_results:
        cause = analysis.gates["healthy"].cause(arms[0])
        because = f", because {cause}" if cause else ""
        nothing = f"nothing was measured for {join_names(arms)} and {baseline}"
        return f"No answer: {nothing}{because}{missing}."
    if words == {"invalid"}:
        return f"No answer: {_invalid_arms(by_arm)}."
    if words - {"invalid"} == {"estimate_only"}:
        return f"Estimate only {_estimates(by_arm, baseline)}{missing}."
    if words.isdisjoint((*CHANGED_WORDS, *UNCHANGED_WORDS)):
        return f"Not decided: {_not_decided(by_arm, baseline)}{missing}."
    where = "In the emulator" if analysis.data.emulated else "On this machine"
    if len(arms) == 1:
        return f"{where} {_arm_clause(arms[0], all_results, baseline)}{missing}."
    clauses = [_arm_clause(arm, results, None) for arm, results in by_arm.items() if results]
    return f"{where}, against {baseline}: {'; '.join(clauses)}{missing}."


def _estimates(by_arm: Results, baseline: str) -> str:
    """Return the reason and every arm's estimates: ``(why): against x, y is 12.0 % faster (a)``."""
    estimated, invalid = (
        {arm: [r for r in results if (r.verdict.word == "invalid") is is_invalid]
         for arm, results in by_arm.items()}
        for is_invalid in (False, True)
    )  # fmt: skip
    clauses = [
        f"{arm} is {', '.join(_effect_range(group) for group in _by_metric(results))}"
        for arm, results in estimated.items()
        if results
    ]
    clauses += [
        f"{arm} is invalid: {_cause(results)}" for arm, results in invalid.items() if results
    ]
    reason = _cause([result for results in estimated.values() for result in results])
    return f"({reason}): against {baseline}, {'; '.join(clauses)}"


def _by_metric(results: Sequence[_RowVerdict]) -> list[list[_RowVerdict]]:
    """Return the verdicts grouped by metric, in the order of their first rows."""
    groups: dict[str | None, list[_RowVerdict]] = {}
    for result in results:
        groups.setdefault(result.row.metric, []).append(result)
    return list(groups.values())


def _computed_sentences(by_arm: Results, baseline: str) -> list[str]:
    """Return a sentence for each computed metric, with the values and their differences."""
    groups = _by_metric([result for results in by_arm.values() for result in results])
    return [
        _computed_values(group) if group[0].row.case == "all" else _computed_ranges(group, baseline)
        for group in groups
    ]


def _computed_values(group: Sequence[_RowVerdict]) -> str:
    """Return a sentence with a metric's values over all requests and their differences.

    Example: ``Wasted KV memory (computed): a 59.9 %, b 9.7 % (50.2 points less).``
    """
    first = group[0]
    base, unit = first.baseline or 0.0, first.row.unit
    parts = [f"{first.comparison.baseline} {value_with_unit(base, unit)}"]
    for result in group:
        value = result.median(result.comparison.arm)
        text = (
            f"{value_with_unit(value, unit)} ({_difference(result)})"
            if value is not None
            else "unknown"
        )
        parts.append(f"{result.comparison.arm} {text}")
    return f"{_capitalised(first.definition.label)} (computed): {', '.join(parts)}."


def _computed_ranges(group: Sequence[_RowVerdict], baseline: str) -> str:
    """Return a sentence on a metric of several cases: the range of each arm's differences."""
    parts = []
    for arm in dict.fromkeys(result.comparison.arm for result in group):
        rows = [result for result in group if result.comparison.arm == arm]
        names: dict[str, list[str]] = {}
        for result in sorted(rows, key=lambda r: r.effect):
            names.setdefault(_difference_with_size(result), []).append(result.name)
        few = [
            f"{text} ({cases[0] if len(cases) == 1 else count_text(len(cases), 'row')})"
            for text, cases in names.items()
        ]
        if len(few) > MAX_NAMED_ROWS:
            few = [f"{few[0]} to {few[-1]}"]
        parts.append(f"{arm} {', '.join(few)}")
    label = _capitalised(group[0].definition.label)
    return f"{label} (computed), against {baseline}: {'; '.join(parts)}."


def _difference_with_size(result: _RowVerdict) -> str:
    """Return a difference with its size in the metric's unit: ``189 steps (95.0 %) lower``.

    The size is needed where the two values themselves are not shown.
    """
    text = _difference(result)
    percent, sign, word = text.partition(" % ")
    if not sign:
        return text
    base = result.baseline or 0.0
    size = abs((result.median(result.comparison.arm) or 0.0) - base)
    return f"{value_with_unit(size, result.row.unit)} ({percent} %) {word}"


def _difference(result: _RowVerdict) -> str:
    """Return the difference of two computed values: ``50.2 points less``, ``the same``."""
    row, base = result.row, result.baseline or 0.0
    value = result.median(result.comparison.arm) or 0.0
    if value == base:
        return "the same"
    word = change_word(row.metric, row.unit, row.better, value > base)
    unit_size = size_text(row.unit, value - base)
    if base <= 0 or unit_size.endswith(" points"):
        return f"{unit_size} {word}"
    return f"{magnitude_text(100 * (value / base - 1))} % {word}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _row_verdicts(analysis: CellAnalysis, arm: str) -> list[_RowVerdict]:
    """Return an arm's verdicts in the measured primary rows."""
    primary = [row for row in analysis.rows if row.primary]
    several = len({row.metric for row in primary if row.metric is not None}) > 1
    return [
        _RowVerdict(_name(one.row, several), one.row, one.comparison, one.verdict)
        for one in analysis.judged
        if one.row.primary and one.comparison.arm == arm
    ]


def _name(row: MetricRow, several: bool) -> str:
    if row.case == "all":
        return str(row.metric)
    return f"{row.case}: {row.metric}" if several else row.case


def _not_measured(analysis: CellAnalysis) -> str:
    """Return a clause that names the rows without measurements, or an empty string."""
    names = [row.case for row in analysis.rows if row.primary and row.skipped is not None]
    measured = {row.metric for row in analysis.rows}
    names += [m for m in analysis.data.metrics if m not in measured and m != OUTPUTS]
    return f"; not measured: {_first_names(names)}" if names else ""


def _arm_clause(arm: str, results: Sequence[_RowVerdict], baseline: str | None) -> str:
    """Return one arm's clause, or a clause for each metric if there are several."""
    groups = _by_metric(results)
    if len(groups) == 1:
        return _metric_clause(arm, results, baseline, "")
    clauses: list[str] = []
    for group in groups:
        subject = "it" if clauses else arm
        where = f" in {group[0].row.metric}"
        clauses.append(_metric_clause(subject, group, None if clauses else baseline, where))
    return "; ".join(clauses)


def _metric_clause(
    arm: str, results: Sequence[_RowVerdict], baseline: str | None, where: str
) -> str:
    """Return one arm's clause on one metric: its changed, unchanged, undecided and invalid rows.

    ``where``: the metric as a phrase if there are several metrics, else empty.
    """
    than, from_baseline = (f" than {baseline}", f" from {baseline}") if baseline else ("", "")
    changed = [r for r in results if r.verdict.word in CHANGED_WORDS]
    unchanged = [r for r in results if r.verdict.word in UNCHANGED_WORDS]
    total = len(results)
    parts: list[str] = []
    if changed and len(changed) <= len(unchanged):
        parts.append(f"{arm} {_unchanged_clause(unchanged, from_baseline)}{where}")
        exceptions = join_names([f"{r.name} ({r.effect_text})" for r in _by_size(changed)])
        if len(changed) > MAX_NAMED_ROWS:
            exceptions = f"{count_text(len(changed), 'row')} ({_effect_range(changed)})"
        if len(unchanged) + len(changed) < total:
            parts[0] += f"{_in_some_rows(len(unchanged), total)}; it differs more in {exceptions}"
        else:
            parts[0] += f", except in {exceptions}"
    else:
        if changed:
            parts.append(f"{arm} {_changed_clause(changed, than, total)}")
        if unchanged:
            clause = _unchanged_clause(unchanged, "" if changed else from_baseline)
            subject = "and" if changed else arm
            parts.append(f"{subject} {clause}{where}{_in_some_rows(len(unchanged), total)}")
    clauses = [" ".join(parts)] if parts else []
    for word, rows in (
        ("not decided", [r for r in results if r.verdict.word in UNDECIDED_WORDS]),
        ("invalid", [r for r in results if r.verdict.word == "invalid"]),
    ):
        if rows:
            reason = f": {_cause(rows)}" if word == "invalid" else _detectable(rows)
            subject = "" if clauses else f"{arm} is "
            clauses.append(f"{subject}{word}{where}{_in_named_rows(rows, total)}{reason}")
    return "; ".join(clauses)


def _unchanged_clause(unchanged: Sequence[_RowVerdict], from_baseline: str) -> str:
    limit = magnitude_text(_largest_bound(unchanged))
    return f"differs{from_baseline} by at most {limit} %"


def _changed_clause(changed: Sequence[_RowVerdict], than: str, total: int) -> str:
    """Return the changes with a verb: ``is faster than x in 3 of 5 rows, by 2 to 4 %``."""
    if total == 1:
        return _single_change(changed[0], than)
    by_direction: dict[str, list[_RowVerdict]] = {}
    for result in changed:
        by_direction.setdefault(result.word, []).append(result)
    parts: list[str] = []
    for word, results in by_direction.items():
        comparative = _comparative(word, results[0].definition, bool(parts))
        few = len(results) < min(3, total)
        names = f" ({join_names([r.name for r in results])})" if few else ""
        rows = _rows_of(len(results), total)
        first_than = than if not parts else ""
        parts.append(f"{comparative}{first_than} in {rows}{names}, by {_size_range(results)} %")
    return " and ".join(parts)


def _single_change(result: _RowVerdict, than: str) -> str:
    """Return the change in the only row: ``has a lower E2E than x, by 12 ms (5 %, 3 to 6 %)``."""
    low, high = sorted(map(abs, result.comparison.ci_pct or (result.effect,) * 2))
    interval = f"{magnitude_text(low)} to {magnitude_text(high)} %"
    percent = f"{magnitude_text(result.effect)} %"
    if result.definition.is_speed:
        return f"is {percent} {result.word}{than} ({result.name}, {interval})"
    comparative = _comparative(result.word, result.definition, False)
    if result.own_size is None:
        return f"{comparative}{than}, by {percent} ({interval})"
    size = size_text(result.row.unit, result.own_size)
    return f"{comparative}{than}, by {size} ({percent}, {interval})"


def _comparative(word: str, metric: MetricDefinition, repeated: bool) -> str:
    """Return a direction with its verb: ``is faster``, ``has a lower TTFT``.

    ``repeated``: the sentence has named a direction before, so the verb is left out.
    """
    if metric.is_speed:
        return word if repeated else f"is {word}"
    article = "" if metric.is_mass_noun else "a "
    if repeated:
        return f"{word}" if metric.is_mass_noun else f"a {word} one"
    return f"has {article}{word} {metric.label}"


def _not_decided(by_arm: Results, baseline: str) -> str:
    """Return a clause for a cell without decided rows: the rows, and the detectable effect."""
    all_results = [result for results in by_arm.values() for result in results]
    undecided = [r for r in all_results if r.verdict.word in UNDECIDED_WORDS]
    invalid = [r for r in all_results if r.verdict.word == "invalid"]
    arms = list(dict.fromkeys(r.comparison.arm for r in undecided))
    rows = list(dict.fromkeys(r.name for r in undecided))
    where = f"in {rows[0]}" if len(rows) == 1 else f"in any of {len(rows)} rows"
    differ = "differs" if len(arms) == 1 else "differ"
    text = f"whether {join_names(arms, 'or')} {differ} from {baseline} {where}"
    text += _detectable(undecided)
    if invalid:
        names = join_names(list(dict.fromkeys(r.comparison.arm for r in invalid)))
        text += f"; {names}: invalid: {_cause(invalid)}"
    return text


def _detectable(undecided: Sequence[_RowVerdict]) -> str:
    """Return a clause with the range of the smallest detectable effects of undecided rows.

    If all rows are ``estimate_only``, the clause gives their estimates instead. If no detectable
    effect is known, it gives the reason why the rows are undecided.
    """
    estimates = [
        r for r in undecided if r.verdict.word == "estimate_only" and r.comparison.effect_pct
    ]
    if estimates and len(estimates) == len(undecided):
        reasons = list(dict.fromkeys(str(r.verdict.reason) for r in estimates))
        return f"; an estimate only ({reasons[0]}): {_effect_range(estimates)}"
    detectable = [r for r in undecided if r.comparison.mde_pct is not None]
    if not detectable:
        return f" ({_cause(undecided)})"
    sizes = sorted(
        ((r.comparison.mde_pct or 0.0, r.name) for r in detectable), key=lambda pair: pair[0]
    )
    (low, low_row), (high, high_row) = sizes[0], sizes[-1]
    text = f"; the smallest detectable effect is {magnitude_text(low)} %"
    if magnitude_text(low) == magnitude_text(high):
        return text
    if low_row == high_row:
        return f"{text} to {magnitude_text(high)} %"
    return f"{text} ({low_row}) to {magnitude_text(high)} % ({high_row})"


def _effect_range(results: Sequence[_RowVerdict]) -> str:
    """Return the best to the worst effect with the rows: ``8.4 % faster (x) to 0.1 % slower (y)``.

    If they are the same, return only one.
    """
    best, worst = (
        pick(results, key=lambda r: r.effect if r.row.better == "higher" else -r.effect)
        for pick in (max, min)
    )
    if best is worst:
        return f"{best.effect_text} ({best.name})"
    return f"{best.effect_text} ({best.name}) to {worst.effect_text} ({worst.name})"


def _invalid_arms(by_arm: Results) -> str:
    causes: dict[str, list[str]] = {}
    for arm, results in by_arm.items():
        causes.setdefault(_cause(results), []).append(arm)
    return "; ".join(
        f"{join_names(arms)} {'is' if len(arms) == 1 else 'are'} invalid: {cause}"
        for cause, arms in causes.items()
    )


def _cause(results: Sequence[_RowVerdict]) -> str:
    causes = list(dict.fromkeys(str(r.verdict.reason) for r in results))
    others = f" (and {count_text(len(causes) - 1, 'other cause')})" if len(causes) > 1 else ""
    return f"{causes[0]}{others}"


def _no_arms(analysis: CellAnalysis) -> str:
    """Return the headline of a cell without treatment arms: the noise of the A/A control."""
    control = analysis.data.control
    results = _row_verdicts(analysis, control) if control is not None else []
    known = [r for r in results if r.comparison.effect_pct is not None]
    if not known:
        return f"No arms to compare: {analysis.data.baseline} is the only one."
    largest = max(known, key=lambda r: abs(r.effect))
    return (
        f"No arms to compare: two identical copies of {analysis.data.baseline} measured up to "
        f"{percent_text(largest.effect)} apart ({largest.name}){_detectable(known)}."
    )


def _largest_bound(results: Iterable[_RowVerdict]) -> float:
    return max(r.bound for r in results)


def _by_size(results: Iterable[_RowVerdict]) -> list[_RowVerdict]:
    return sorted(results, key=lambda r: -abs(r.effect))


def _size_range(results: Sequence[_RowVerdict]) -> str:
    sizes = sorted(abs(r.effect) for r in results)
    low, high = magnitude_text(sizes[0]), magnitude_text(sizes[-1])
    return low if low == high else f"{low} to {high}"


def _in_some_rows(part: int, total: int) -> str:
    """Return `` in 3 of 5 rows``, or an empty string if ``part`` is all rows."""
    return "" if part == total else f" in {_rows_of(part, total)}"


def _rows_of(part: int, total: int) -> str:
    if part == total:
        return "both rows" if total == 2 else f"all {total} rows"
    return f"{part} of {total} rows"


def _in_named_rows(results: Sequence[_RowVerdict], total: int) -> str:
    if len(results) == total:
        return ""
    return f" in {count_text(len(results), 'row')} ({_first_names([r.name for r in results])})"


def _first_names(names: Sequence[str]) -> str:
    named = list(names[:MAX_NAMED_ROWS])
    rest = len(names) - len(named)
    return "; ".join([*named, *([f"{rest} more"] if rest else [])])
