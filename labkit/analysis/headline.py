"""The headline: the answer to a cell's question in one sentence, the same in every format.

It states the decided effects and their sizes, then the undecided rows and the smallest effect that
could have been detected in them. It is built only from verdicts, so no direction is given for an
inconclusive row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.analysis.arm_comparison import ArmComparison
from labkit.analysis.best_setting import best_sentence
from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import count_text, magnitude_text, percent_text
from labkit.analysis.observations import MetricRow
from labkit.analysis.verdict import Verdict
from labkit.analysis.verdict_sentences import direction

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
    def effect_text(self) -> str:
        """The effect as text: ``2.1 % faster``."""
        return direction(self.row.unit, self.row.better, self.effect)


def headline(analysis: CellAnalysis) -> str:
    """Return a cell's headline, from the verdicts on its primary rows."""
    arms, baseline = analysis.data.treatment_arms, analysis.data.baseline
    if analysis.data.sweep:
        return best_sentence(analysis.json)
    if not arms:
        return _no_arms(analysis)
    by_arm = {arm: _row_verdicts(analysis, arm) for arm in arms}
    all_results = [result for results in by_arm.values() for result in results]
    words = {result.verdict.word for result in all_results}
    missing = _not_measured(analysis)
    if not all_results:
        return f"No answer: nothing was measured for {_join_names(arms)} and {baseline}{missing}."
    if words == {"invalid"}:
        return f"No answer: {_invalid_arms(by_arm)}."
    if words.isdisjoint((*CHANGED_WORDS, *UNCHANGED_WORDS)):
        return f"Not decided: {_not_decided(by_arm, baseline)}{missing}."
    where = "In the emulator" if analysis.data.emulated else "On this machine"
    if len(arms) == 1:
        return f"{where} {_arm_clause(arms[0], all_results, baseline)}{missing}."
    clauses = [_arm_clause(arm, results, None) for arm, results in by_arm.items()]
    return f"{where}, against {baseline}: {'; '.join(clauses)}{missing}."


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
    return f"; not measured: {_first_names(names)}" if names else ""


def _arm_clause(arm: str, results: Sequence[_RowVerdict], baseline: str | None) -> str:
    """Return one arm's clause: its changed, unchanged, undecided and invalid rows."""
    than, from_baseline = (f" than {baseline}", f" from {baseline}") if baseline else ("", "")
    changed = [r for r in results if r.verdict.word in CHANGED_WORDS]
    unchanged = [r for r in results if r.verdict.word in UNCHANGED_WORDS]
    total = len(results)
    parts: list[str] = []
    if changed and len(changed) <= len(unchanged):
        parts.append(f"{arm} {_unchanged_clause(unchanged, from_baseline)}")
        exceptions = _join_names([f"{r.name} ({r.effect_text})" for r in _by_size(changed)])
        if len(changed) > MAX_NAMED_ROWS:
            exceptions = f"{count_text(len(changed), 'row')} ({_effect_range(changed)})"
        if len(unchanged) + len(changed) < total:
            parts[0] += f"{_in_some_rows(len(unchanged), total)}; it differs more in {exceptions}"
        else:
            parts[0] += f", except in {exceptions}"
    else:
        if changed:
            parts.append(f"{arm} is {_changed_clause(changed, than, total)}")
        if unchanged:
            clause = _unchanged_clause(unchanged, "" if changed else from_baseline)
            subject = "and" if changed else arm
            parts.append(f"{subject} {clause}{_in_some_rows(len(unchanged), total)}")
    clauses = [" ".join(parts)] if parts else []
    for word, rows in (
        ("not decided", [r for r in results if r.verdict.word in UNDECIDED_WORDS]),
        ("invalid", [r for r in results if r.verdict.word == "invalid"]),
    ):
        if rows:
            reason = f": {_cause(rows)}" if word == "invalid" else _detectable(rows)
            subject = "" if clauses else f"{arm} is "
            clauses.append(f"{subject}{word}{_in_named_rows(rows, total)}{reason}")
    return "; ".join(clauses)


def _unchanged_clause(unchanged: Sequence[_RowVerdict], from_baseline: str) -> str:
    limit = magnitude_text(_largest_bound(unchanged))
    return f"differs{from_baseline} by at most {limit} %"


def _changed_clause(changed: Sequence[_RowVerdict], than: str, total: int) -> str:
    """Return the direction and size of changes: ``faster than x in 3 of 5 rows, by 2 to 4 %``."""
    by_direction: dict[str, list[_RowVerdict]] = {}
    for result in changed:
        by_direction.setdefault(result.effect_text.rsplit(" ", 1)[1], []).append(result)
    parts: list[str] = []
    for word, results in by_direction.items():
        comparative = f"{word}{than if not parts else ''}"
        if total == 1:
            low, high = sorted(map(abs, results[0].comparison.ci_pct or (results[0].effect,) * 2))
            parts.append(
                f"{magnitude_text(results[0].effect)} % {comparative} ({results[0].name}, "
                f"{magnitude_text(low)} to {magnitude_text(high)} %)"
            )
            continue
        few = len(results) < min(3, total)
        names = f" ({_join_names([r.name for r in results])})" if few else ""
        rows = _rows_of(len(results), total)
        parts.append(f"{comparative} in {rows}{names}, by {_size_range(results)} %")
    return " and ".join(parts)


def _not_decided(by_arm: dict[str, list[_RowVerdict]], baseline: str) -> str:
    """Return a clause for a cell without decided rows: the open question, detectable effects."""
    all_results = [result for results in by_arm.values() for result in results]
    undecided = [r for r in all_results if r.verdict.word in UNDECIDED_WORDS]
    invalid = [r for r in all_results if r.verdict.word == "invalid"]
    arms = list(dict.fromkeys(r.comparison.arm for r in undecided))
    rows = list(dict.fromkeys(r.name for r in undecided))
    where = f"in {rows[0]}" if len(rows) == 1 else f"in any of {len(rows)} rows"
    differ = "differs" if len(arms) == 1 else "differ"
    text = f"whether {_join_names(arms, 'or')} {differ} from {baseline} {where}"
    text += _detectable(undecided)
    if invalid:
        names = _join_names(list(dict.fromkeys(r.comparison.arm for r in invalid)))
        text += f"; {names}: invalid: {_cause(invalid)}"
    return text


def _detectable(undecided: Sequence[_RowVerdict]) -> str:
    """Return a clause with the range of the smallest detectable effects of undecided rows.

    If all rows are ``estimate_only``, the clause gives their estimates instead. If no detectable
    effect is known, it gives the reason that the rows are undecided.
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
    """Return the range of effects with its rows: ``8.4 % faster (x) to 0.1 % slower (y)``."""
    best, worst = (
        pick(results, key=lambda r: r.effect if r.row.better == "higher" else -r.effect)
        for pick in (max, min)
    )
    if best is worst:
        return f"{best.effect_text} ({best.name})"
    return f"{best.effect_text} ({best.name}) to {worst.effect_text} ({worst.name})"


def _invalid_arms(by_arm: dict[str, list[_RowVerdict]]) -> str:
    causes: dict[str, list[str]] = {}
    for arm, results in by_arm.items():
        causes.setdefault(_cause(results), []).append(arm)
    return "; ".join(
        f"{_join_names(arms)} {'is' if len(arms) == 1 else 'are'} invalid: {cause}"
        for cause, arms in causes.items()
    )


def _cause(results: Sequence[_RowVerdict]) -> str:
    causes = list(dict.fromkeys(str(r.verdict.reason) for r in results))
    others = f" (and {len(causes) - 1} other causes)" if len(causes) > 1 else ""
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


def _join_names(names: Sequence[str], last: str = "and") -> str:
    if len(names) < 3:
        return f" {last} ".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"
