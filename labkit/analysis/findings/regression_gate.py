"""The gate for CI: is an arm worse than the baseline, row by row and in all, with a summary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from labkit.analysis.comparison.verdict import NOISE_EXCEEDS_MARGIN
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.row_model import Comparison, Row


class Outcome(Enum):
    """The outcome of a test; the value is the program's exit code."""

    no_worse = 0
    worse = 1
    undecided = 125


WORDS = {
    "worse": Outcome.worse,
    **dict.fromkeys(("better", "equivalent", "trivial"), Outcome.no_worse),
}
TITLES = {
    Outcome.no_worse: "No worse",
    Outcome.worse: "Worse",
    Outcome.undecided: "Undecided",
}


@dataclass(frozen=True)
class RowResult:
    """The outcome of one primary row of a subject: an arm's comparison with the baseline."""

    subject: str
    row: Row
    comparison: Comparison
    outcome: Outcome


def row_results(subject: str, cell: Cell, arm: str) -> Iterator[RowResult]:
    """Yield an arm's result in every primary row of a subject's cell."""
    for row in cell.primary_rows:
        comparison = row.comparison(arm)
        if row.skipped is None and comparison is not None:
            outcome = _outcome(row, comparison, cell.design.margin_pct)
            yield RowResult(subject, row, comparison, outcome)


def _outcome(row: Row, one: Comparison, margin_pct: float) -> Outcome:
    """Return the outcome of a row, where ``one`` compares the arm with the baseline.

    An inconclusive row counts as no worse if even the worst change in its adjusted interval is
    smaller than the margin, and as undecided otherwise. If the A/A control varies by more than the
    margin, the row is undecided in any case.
    """
    if one.verdict in WORDS:
        return WORDS[one.verdict]
    if one.verdict == "computed":
        return _computed_outcome(row, one)
    undecided = one.verdict != "inconclusive" or one.reason == NOISE_EXCEEDS_MARGIN
    if one.ci_pct is None or undecided:
        return Outcome.undecided
    worst = -one.ci_pct[0] if row.better == "higher" else one.ci_pct[1]
    return Outcome.no_worse if worst < margin_pct else Outcome.undecided


def _computed_outcome(row: Row, one: Comparison) -> Outcome:
    """Return the outcome of a row whose values have no noise: the slightest loss counts."""
    base, head = (row.median(arm) or 0.0 for arm in (one.baseline, one.arm))
    worse = head < base if row.better == "higher" else head > base
    return Outcome.worse if worse else Outcome.no_worse


def total(results: Sequence[RowResult]) -> Outcome:
    """Return the outcome of all rows together.

    It is ``worse`` if any row is worse, ``no_worse`` if all rows are no worse, else ``undecided``.
    """
    outcomes = {result.outcome for result in results}
    if Outcome.worse in outcomes:
        return Outcome.worse
    return Outcome.no_worse if outcomes == {Outcome.no_worse} else Outcome.undecided


def markdown(title: str, results: Sequence[RowResult], margin_pct: float) -> str:
    """Return the Markdown summary for a pull request: a table with one line per row."""
    outcome = total(results)
    lines = [
        f"### {TITLES[outcome]}: {title}",
        "",
        f"Margin {margin_pct:g} %; intervals and p are adjusted over rows.",
        "",
        "| on | row | metric | baseline | change, % | interval, % | p | outcome |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        one, row = result.comparison, result.row
        interval = "" if one.ci_pct is None else "{:+.1f} to {:+.1f}".format(*one.ci_pct)
        p = "" if one.p_adjusted is None else f"{one.p_adjusted:.2g}"
        effect = "" if one.effect_pct is None else f"{one.effect_pct:+.1f}"
        reason = f" ({one.reason})" if one.reason and result.outcome is not Outcome.no_worse else ""
        median = row.median(one.baseline)
        base = "" if median is None else f"{median:,.4g} {row.unit}"
        cells = (result.subject, row.case, row.metric, base, effect, interval, p)
        words = " | ".join(str(cell).replace("|", "\\|") for cell in cells)
        lines.append(f"| {words} | {TITLES[result.outcome].lower()}{reason} |")
    return "\n".join(lines) + "\n"


def publish_summary(text: str, file: Path | None) -> None:
    """Append a summary to ``file`` and to ``$GITHUB_STEP_SUMMARY``, if they are given."""
    for path in (file, os.environ.get("GITHUB_STEP_SUMMARY")):
        if path:
            with open(path, "a", encoding="utf-8") as summary:
                summary.write(text)
