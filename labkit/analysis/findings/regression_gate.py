"""The gate for CI: is an arm worse than the baseline, row by row and in all, with a summary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import (
    MINUS,
    interval_text,
    p_text,
    signed_text,
    significant_text,
    unit_name,
    value_text,
)
from labkit.analysis.text_format import markdown_text
from labkit.config import require


class Outcome(Enum):
    """The outcome of a test; the value is the program's exit code."""

    no_worse = 0
    worse = 1
    undecided = 125


WORDS = {
    "worse": Outcome.worse,
    **dict.fromkeys(("better", "equivalent", "trivial"), Outcome.no_worse),
}
TITLES = {Outcome.no_worse: "No worse", Outcome.worse: "Worse", Outcome.undecided: "Undecided"}
HALF_WIDTH = 24  # of the picture, in characters on either side of 0


@dataclass(frozen=True)
class RowResult:
    """The outcome of one primary row of a subject: an arm's comparison with the baseline."""

    subject: str
    row: Row
    comparison: Comparison
    outcome: Outcome


Results = Mapping[str, Sequence[RowResult]]  # of every subject, by its name


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
    smaller than the margin, and as undecided otherwise. A row whose word was withheld is undecided:
    the A/A control varies by more than the margin, or slow launches or stalls may be its own work.
    From a baseline that is 0 in every run, no change has a percentage: if less is better, the row
    is no worse only if the arm is 0 in every run, too; if more is better, nothing is worse than 0.
    """
    if one.verdict in WORDS:
        return WORDS[one.verdict]
    if one.verdict == "computed":
        return _computed_outcome(row, one, margin_pct)
    if one.verdict != "inconclusive":
        return Outcome.undecided
    if one.difference is not None:
        no_worse = row.better == "higher" or not any(run.value for run in row.arms[one.arm].runs)
    elif one.ci_pct is None or one.is_withheld(margin_pct):
        no_worse = False
    else:
        no_worse = (-one.ci_pct[0] if row.better == "higher" else one.ci_pct[1]) < margin_pct
    return Outcome.no_worse if no_worse else Outcome.undecided


def _computed_outcome(row: Row, one: Comparison, margin_pct: float) -> Outcome:
    """Return the outcome of a row without noise, which is undecided if a value is absent.

    A change without a percentage counts, however small.
    """
    base, head = row.median(one.baseline), row.median(one.arm)
    if base is None or head is None:
        return Outcome.undecided
    small = one.effect_pct is not None and abs(one.effect_pct) < margin_pct
    worse = head < base if row.better == "higher" else head > base
    return Outcome.worse if worse and not small else Outcome.no_worse


def total(results: Results) -> Outcome:
    """Return the outcome of all subjects together.

    It is ``worse`` if any row is worse, ``no_worse`` if all rows are no worse, else ``undecided``.
    A subject without rows is undecided.
    """
    outcomes = {result.outcome for rows in results.values() for result in rows}
    if not all(results.values()):
        outcomes.add(Outcome.undecided)
    if Outcome.worse in outcomes:
        return Outcome.worse
    return Outcome.no_worse if outcomes == {Outcome.no_worse} else Outcome.undecided


def markdown(title: str, results: Results, margin_pct: float) -> str:
    """Return the Markdown summary for a pull request: a table and a picture, a line per row."""
    outcome = total(results)
    lines = [
        f"### {TITLES[outcome]}: {title}",
        "",
        f"Margin {margin_pct:g} %; intervals and p are adjusted over rows.",
        "",
        "| on | row | metric | baseline | change, % | interval, % | p | outcome |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    what = f"{TITLES[Outcome.undecided].lower()} (it has no result in a primary row)"
    for subject, rows in results.items():
        lines += map(_line, rows) if rows else [f"| {_cell(subject)} | | | | | | | {what} |"]
    drawn = [result for rows in results.values() for result in rows]
    return "\n".join([*lines, *_picture(drawn, margin_pct)]) + "\n"


def _line(result: RowResult) -> str:
    one, row = result.comparison, result.row
    interval = "" if one.ci_pct is None else interval_text(*one.ci_pct)
    p = "" if one.p_adjusted is None else p_text(one.p_adjusted)
    effect = "" if one.effect_pct is None else signed_text(one.effect_pct)
    reason = f" ({one.reason})" if one.reason and result.outcome is not Outcome.no_worse else ""
    base = f"{value_text(row.median(one.baseline), row.unit)} {unit_name(row.unit)}"
    outcome = f"{TITLES[result.outcome].lower()}{reason}"
    cells = (result.subject, row.case, row.metric, base, effect, interval, p, outcome)
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: object) -> str:
    return markdown_text(str(text).replace("|", "\\|").replace("\n", " "))


def _picture(results: Sequence[RowResult], margin_pct: float) -> Iterator[str]:
    """Yield the changes with their intervals as characters, which every forge and terminal shows.

    The margin is dotted, and the scale ends at the largest number.
    """
    drawn = [result for result in results if result.comparison.effect_pct is not None]
    if not drawn:
        return
    names = [f"{r.subject} {r.row.case} {r.row.metric}" for r in drawn]
    limit = max(margin_pct, *(abs(pct) for r in drawn for pct in r.comparison.known_pct))
    indent = " " * max(map(len, names))
    yield from ("", "```text")
    for name, result in zip(names, drawn, strict=True):
        yield f"{name:{len(indent)}}  {_bar(result.comparison, margin_pct, limit)}".rstrip()
    end = significant_text(limit, 3)
    yield f"{indent}  {f'{MINUS}{end} %':<{HALF_WIDTH}}0{f'+{end} %':>{HALF_WIDTH}}"
    yield "```"


def _bar(one: Comparison, margin_pct: float, limit: float) -> str:
    def place(pct: float) -> int:
        return HALF_WIDTH + round(pct / limit * HALF_WIDTH)

    line = [" "] * (2 * HALF_WIDTH + 1)
    line[place(-margin_pct)] = line[place(margin_pct)] = "┊"
    line[HALF_WIDTH] = "│"
    if one.ci_pct is not None:
        low, high = map(place, one.ci_pct)
        line[low : high + 1] = ["├", *"─" * (high - low - 1), "┤"][: high - low + 1]
    line[place(one.effect_pct or 0.0)] = "●"
    return "".join(line)


def check_summary(file: Path | None) -> None:
    """Raise ``ConfigError`` unless :func:`publish_summary` can write its files. Write nothing."""
    for path in _summary_files(file):
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        is_right_kind = existing.is_dir() == (existing != path)
        require(
            is_right_kind and os.access(existing, os.W_OK),
            f"{'--summary' if path == file else '$GITHUB_STEP_SUMMARY'} {path}: no file can be "
            "written there",
        )


def publish_summary(text: str, file: Path | None) -> None:
    """Append a summary to ``file`` and ``$GITHUB_STEP_SUMMARY``, if given; make their folders."""
    for path in _summary_files(file):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as summary:
            summary.write(text)


def _summary_files(file: Path | None) -> list[Path]:
    return [Path(name) for name in (file, os.environ.get("GITHUB_STEP_SUMMARY")) if name]
