"""The answer to a cell's question in one sentence, the same in every form.

It says what was decided and how large it is, then what was not decided and the smallest
effect that could have been seen there. Only verdicts make it: a row that is not decided has
no direction in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.analysis.arm_comparison import ArmComparison
from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import count_text, magnitude_text, percent_text
from labkit.analysis.observations import MetricRow
from labkit.analysis.verdict import Verdict
from labkit.analysis.verdict_sentences import direction

NAMED = 3  # more rows than these are counted, and the extreme one is named
MOVED = ("faster", "slower")
FLAT = ("equivalent", "trivial")
OPEN = ("inconclusive", "estimate_only")


@dataclass(frozen=True)
class _Result:
    """One primary row and arm with its verdict; ``name`` is the row's."""

    name: str
    row: MetricRow
    comparison: ArmComparison
    verdict: Verdict

    @property
    def effect(self) -> float:
        return self.comparison.effect_pct or 0.0

    @property
    def bound(self) -> float:
        """The end of the interval that is further from no effect, in percent."""
        return max(map(abs, self.comparison.ci_pct or (self.effect,)))

    @property
    def moved(self) -> str:
        """The effect in words: ``2.1 % faster``."""
        return direction(self.row.unit, self.row.better, self.effect)


def headline(analysis: CellAnalysis) -> str:
    """Answer a cell's question in one sentence, from its verdicts on the primary rows."""
    arms, baseline = analysis.data.treatment_arms, analysis.data.baseline
    if not arms:
        return _without_arms(analysis)
    found = {arm: _results(analysis, arm) for arm in arms}
    every = [result for results in found.values() for result in results]
    words = {result.verdict.word for result in every}
    missing = _missing(analysis)
    if not every:
        return f"No answer: nothing was measured of {_listed(arms)} and {baseline}{missing}."
    if words == {"invalid"}:
        return f"No answer: {_invalid(found)}."
    if words.isdisjoint((*MOVED, *FLAT)):
        return f"Not decided: {_undecided(found, baseline)}{missing}."
    where = "In the emulator" if analysis.data.emulated else "On this machine"
    if len(arms) == 1:
        return f"{where} {_clause(arms[0], every, baseline)}{missing}."
    clauses = [_clause(arm, results, None) for arm, results in found.items()]
    return f"{where}, against {baseline}: {'; '.join(clauses)}{missing}."


def _results(analysis: CellAnalysis, arm: str) -> list[_Result]:
    """Return an arm's results in the primary rows that were measured."""
    primary = [row for row in analysis.rows if row.primary]
    several = len({row.metric for row in primary if row.metric is not None}) > 1
    return [
        _Result(_name(one.row, several), one.row, one.comparison, one.verdict)
        for one in analysis.judged
        if one.row.primary and one.comparison.arm == arm
    ]


def _name(row: MetricRow, several: bool) -> str:
    if row.case == "all":
        return str(row.metric)
    return f"{row.case}: {row.metric}" if several else row.case


def _missing(analysis: CellAnalysis) -> str:
    """Name the rows that were not measured."""
    names = [row.case for row in analysis.rows if row.primary and row.skipped is not None]
    return f"; not measured: {_few(names)}" if names else ""


def _clause(arm: str, results: Sequence[_Result], baseline: str | None) -> str:
    """Say one arm's part: what changed, what did not, what was not decided."""
    than, against = (f" than {baseline}", f" against {baseline}") if baseline else ("", "")
    moved = [r for r in results if r.verdict.word in MOVED]
    flat = [r for r in results if r.verdict.word in FLAT]
    total = len(results)
    parts: list[str] = []
    if moved and len(moved) <= len(flat):
        exceptions = _listed([f"{r.name} ({r.moved})" for r in _largest(moved)])
        if len(moved) > NAMED:
            exceptions = f"{count_text(len(moved), 'row')} ({_span(moved)})"
        if len(flat) + len(moved) == total:
            exceptions = f", except {exceptions}"
        else:
            exceptions = f"{_share(len(flat), total)}; it changes {exceptions}"
        parts.append(
            f"{arm} changes nothing by more than {magnitude_text(_bound(flat))} %"
            f"{against}{exceptions}"
        )
    else:
        if moved:
            parts.append(f"{arm} is {_moves(moved, than, total)}")
        if flat:
            subject = "and" if moved else arm
            parts.append(
                f"{subject} changes nothing by more than {magnitude_text(_bound(flat))} %"
                f"{'' if moved else against}{_share(len(flat), total)}"
            )
    said = [" ".join(parts)] if parts else []
    for word, results_of in (
        ("not decided", [r for r in results if r.verdict.word in OPEN]),
        ("invalid", [r for r in results if r.verdict.word == "invalid"]),
    ):
        if results_of:
            why = f": {_cause(results_of)}" if word == "invalid" else _sight(results_of)
            said.append(f"{'' if said else f'{arm} is '}{word}{_where(results_of, total)}{why}")
    return "; ".join(said)


def _moves(moved: Sequence[_Result], than: str, total: int) -> str:
    """Say which way rows moved, by how much: ``faster than x in 3 of 5 rows, by 2 to 4 %``."""
    ways: dict[str, list[_Result]] = {}
    for result in moved:
        ways.setdefault(result.moved.rsplit(" ", 1)[1], []).append(result)
    parts: list[str] = []
    for way, results in ways.items():
        said = f"{way}{than if not parts else ''}"
        if total == 1:
            low, high = sorted(map(abs, results[0].comparison.ci_pct or (results[0].effect,) * 2))
            parts.append(
                f"{magnitude_text(results[0].effect)} % {said} ({results[0].name}, "
                f"{magnitude_text(low)} to {magnitude_text(high)} %)"
            )
        else:
            names = (
                f" ({_listed([r.name for r in results])})" if len(results) < min(3, total) else ""
            )
            parts.append(f"{said} in {_of(len(results), total)}{names}, by {_sizes(results)} %")
    return " and ".join(parts)


def _undecided(found: dict[str, list[_Result]], baseline: str) -> str:
    """Say that nothing was decided of any arm, and what could have been seen."""
    every = [result for results in found.values() for result in results]
    left = [r for r in every if r.verdict.word in OPEN]
    broken = [r for r in every if r.verdict.word == "invalid"]
    arms = list(dict.fromkeys(r.comparison.arm for r in left))
    rows = list(dict.fromkeys(r.name for r in left))
    where = f"in {rows[0]}" if len(rows) == 1 else f"in any of {len(rows)} rows"
    differ = "differs" if len(arms) == 1 else "differ"
    text = f"whether {_listed(arms, 'or')} {differ} from {baseline} {where}{_sight(left)}"
    if broken:
        names = _listed(list(dict.fromkeys(r.comparison.arm for r in broken)))
        text += f"; {names}: invalid: {_cause(broken)}"
    return text


def _sight(left: Sequence[_Result]) -> str:
    """Say what could have been seen where nothing was decided, or why nothing could."""
    guessed = [r for r in left if r.verdict.word == "estimate_only" and r.comparison.effect_pct]
    if guessed and len(guessed) == len(left):
        reasons = list(dict.fromkeys(str(r.verdict.reason) for r in guessed))
        return f"; an estimate only ({reasons[0]}): {_span(guessed)}"
    seen = [r for r in left if r.comparison.mde_pct is not None]
    if not seen:
        return f" ({_cause(left)})"
    sizes = sorted(((r.comparison.mde_pct or 0.0, r.name) for r in seen), key=lambda pair: pair[0])
    (low, here), (high, there) = sizes[0], sizes[-1]
    text = f"; the smallest effect that could be seen is {magnitude_text(low)} %"
    if magnitude_text(low) == magnitude_text(high):
        return text
    if here == there:
        return f"{text} to {magnitude_text(high)} %"
    return f"{text} ({here}) to {magnitude_text(high)} % ({there})"


def _span(results: Sequence[_Result]) -> str:
    """Return the range of effects with their rows: ``8.4 % faster (x) to 0.1 % slower (y)``."""
    best, worst = (
        pick(results, key=lambda r: r.effect if r.row.better == "higher" else -r.effect)
        for pick in (max, min)
    )
    if best is worst:
        return f"{best.moved} ({best.name})"
    return f"{best.moved} ({best.name}) to {worst.moved} ({worst.name})"


def _invalid(found: dict[str, list[_Result]]) -> str:
    causes: dict[str, list[str]] = {}
    for arm, results in found.items():
        causes.setdefault(_cause(results), []).append(arm)
    return "; ".join(
        f"{_listed(arms)} {'is' if len(arms) == 1 else 'are'} invalid: {cause}"
        for cause, arms in causes.items()
    )


def _cause(results: Sequence[_Result]) -> str:
    causes = list(dict.fromkeys(str(r.verdict.reason) for r in results))
    more = f" (and {len(causes) - 1} more causes)" if len(causes) > 1 else ""
    return f"{causes[0]}{more}"


def _without_arms(analysis: CellAnalysis) -> str:
    """Say what there is where nothing was asked: the noise between two equal arms."""
    control = analysis.data.control
    results = _results(analysis, control) if control is not None else []
    known = [r for r in results if r.comparison.effect_pct is not None]
    if not known:
        return f"No question was asked: {analysis.data.baseline} is the only arm."
    largest = max(known, key=lambda r: abs(r.effect))
    return (
        f"No question was asked: {analysis.data.baseline} run twice measured up to "
        f"{percent_text(largest.effect)} apart ({largest.name}){_sight(known)}."
    )


def _bound(results: Iterable[_Result]) -> float:
    return max(r.bound for r in results)


def _largest(results: Iterable[_Result]) -> list[_Result]:
    return sorted(results, key=lambda r: -abs(r.effect))


def _sizes(results: Sequence[_Result]) -> str:
    sizes = sorted(abs(r.effect) for r in results)
    low, high = magnitude_text(sizes[0]), magnitude_text(sizes[-1])
    return low if low == high else f"{low} to {high}"


def _share(part: int, total: int) -> str:
    """Say in how many of the rows, where it is not in all of them."""
    return "" if part == total else f" in {_of(part, total)}"


def _of(part: int, total: int) -> str:
    if part == total:
        return "both rows" if total == 2 else f"all {total} rows"
    return f"{part} of {total} rows"


def _where(results: Sequence[_Result], total: int) -> str:
    if len(results) == total:
        return ""
    return f" in {count_text(len(results), 'row')} ({_few([r.name for r in results])})"


def _few(names: Sequence[str]) -> str:
    shown = list(names[:NAMED])
    rest = len(names) - len(shown)
    return "; ".join([*shown, *([f"{rest} more"] if rest else [])])


def _listed(names: Sequence[str], last: str = "and") -> str:
    if len(names) < 3:
        return f" {last} ".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"
