"""Placeholders of an article: calls that return tables, numbers and figures of studies.

A placeholder is refused if its row was skipped, blocks are missing, a gate failed, or a name does
not exist (the message suggests the nearest one).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from labkit.analysis.number_format import (
    UNKNOWN,
    interval_text,
    p_text,
    percent_text,
    unit_name,
    value_text,
)
from labkit.analysis.rendering.cell_report import CellReport
from labkit.analysis.rendering.markdown_report import markdown_table
from labkit.analysis.rendering.published_table import published_source
from labkit.analysis.rendering.results_table import ResultLine, verdict_text
from labkit.analysis.rendering.tables import Column, text_or_empty
from labkit.analysis.study_analysis import AnalysisCache
from labkit.config.option_index import did_you_mean

Json = Mapping[str, Any]


class ArticleError(Exception):
    """A placeholder cannot be filled; the message is one line."""


@dataclass(frozen=True)
class ArticleBlock:
    """Markdown that stands on lines of its own."""

    text: str


@dataclass(frozen=True)
class ArticleLink:
    """A link in a line, or a picture, to where it comes from."""

    text: str
    target: str
    picture: bool = False


class PlaceholderFunctions:
    """The functions of placeholders; studies are looked up from the article's folder upwards."""

    def __init__(self, folder: Path, analysis_cache: AnalysisCache) -> None:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._folder, self._analysis_cache = folder, analysis_cache
        self._calls: dict[str, Callable[..., ArticleBlock | ArticleLink]] = {
            "table": self.table,
            "value": self.value,
            "figure": self.figure,
            "sentence": self.sentence,
        }
        self._sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined)

    def fill(self, asked: str) -> ArticleBlock | ArticleLink:
        """Evaluate one placeholder; raises :class:`ArticleError` and :class:`RecordError`."""
        from jinja2 import TemplateError

        name = asked.partition("(")[0].strip()
        _one_of("placeholder", name, self._calls)
        try:
            found: Any = self._sandbox.compile_expression(asked, undefined_to_none=False)(
                **self._calls
            )
        except (TemplateError, TypeError) as error:
            raise ArticleError(f"{asked}: {' '.join(str(error).split())}") from None
        if not isinstance(found, ArticleBlock | ArticleLink):
            raise ArticleError(f"{asked}: not a call of {name}()")
        return found

    def table(
        self,
        study: str,
        columns: Sequence[str] | None = None,
        cell: str | None = None,
        links: bool = True,
    ) -> ArticleBlock:
        """Return the table of results, with all columns or those whose headings start as given."""
        report, page = self._report(study, cell)
        shown = list(report.results.columns)
        if columns is not None:
            headings = {column.heading: column for column in shown}
            shown = [headings[_beginning("column", name, headings)] for name in columns]
        if links:
            shown = [_linked(column, page) for column in shown]
        return ArticleBlock(markdown_table(replace(report.results, columns=tuple(shown))))

    def sentence(self, study: str, what: str = "answer", cell: str | None = None) -> ArticleBlock:
        """Return a sentence of the study's report."""
        report, _ = self._report(study, cell)
        text = SENTENCES[_one_of("sentence", what, SENTENCES)](report)
        if text is None:
            raise ArticleError(f"{study}: it has no sentence {what!r}")
        return ArticleBlock(text)

    def figure(self, study: str, file: str, caption: str = "") -> ArticleLink:
        """Return a picture of the study."""
        folder = self._study(study)
        for report in self._reports(folder, study):
            _require_valid(report, study)
        known = [f"plots/{path.name}" for path in sorted((folder / "plots").glob("*"))]
        path = folder / _one_of("figure", file, known)
        return ArticleLink(caption or path.stem, self._link(path), picture=True)

    def value(
        self,
        study: str,
        case: str | None = None,
        arm: str | None = None,
        metric: str | None = None,
        what: str = "median",
        cell: str | None = None,
    ) -> ArticleLink:
        """Return a number: of a row, or (without a case) a counter of an arm."""
        report, page = self._report(study, cell)
        arms = [one["name"] for one in report.cell["arms"]]
        named = _one_of("arm", arm, arms) if arm is not None else None
        if case is None:
            counters = {one["name"]: one["counters"] for one in report.cell["arms"]}
            known = counters[named or arms[0]]
            return ArticleLink(_number(known[_one_of("counter", what, known)]), page)
        index, row = _row(report.cell, case, metric)
        text = _of_row(report, row, named or _other(row, arms), what)
        return ArticleLink(text, f"{page}#{report.anchor}r{index}")

    def _report(self, study: str, cell: str | None) -> tuple[CellReport, str]:
        """Return a cell's report, whose gates held, and the page that lists its records."""
        folder = self._study(study)
        reports = {report.analysis.name: report for report in self._reports(folder, study)}
        if cell is None and len(reports) > 1:
            raise ArticleError(f"{study}: several cells, say cell=: {', '.join(reports)}")
        name = next(iter(reports)) if cell is None else _one_of("cell", cell, reports)
        _require_valid(reports[name], study)
        page = folder / "report.html"
        require(page.is_file(), f"{study}: no report.html; python -m labkit.report {study}")
        return reports[name], self._link(page)

    def _reports(self, folder: Path, study: str) -> Iterable[CellReport]:
        for index, analysis in enumerate(self._analysis_cache.study(folder)):
            yield CellReport(analysis, anchor=f"cell{index}")

    def _study(self, study: str) -> Path:
        for folder in (self._folder, *self._folder.parents):
            if (folder / study).is_dir():
                return folder / study
        raise ArticleError(f"{study}: no such study here or above")

    def _link(self, path: Path) -> str:
        return quote(os.path.relpath(path, self._folder).replace(os.sep, "/"), safe="/=,+~._-")


SENTENCES: dict[str, Callable[[CellReport], str | None]] = {
    "question": lambda report: report.title,
    "answer": lambda report: f"**{report.answer}**",
    "control": lambda report: next((x for x in report.notes if x.startswith("A/A control")), None),
    "machine": lambda report: report.machine[0],
    "published": lambda report: published_source(report.cell),
}


def _require_valid(report: CellReport, study: str) -> None:
    """Raise :class:`ArticleError` if a cell is incomplete or a gate failed."""
    for name, gate in report.analysis.gates.items():
        why = "; ".join(map(str, gate.to_json()["reasons"][:1]))
        require(gate.status != "fail", f"{study}: the gate {name} failed: {why}")
    require(report.analysis.data.complete, f"{study}: not all of its blocks have run")


def _row(cell: Json, case: str, metric: str | None) -> tuple[int, Json]:
    rows = list(enumerate(cell["rows"]))
    name = _one_of("case", case, [row["case"] for _, row in rows])
    mine = [(i, row) for i, row in rows if row["case"] == name]
    if metric is not None:
        known = _one_of("metric", metric, [str(row["metric"]) for _, row in mine])
        mine = [(i, row) for i, row in mine if row["metric"] == known]
    index, row = next(((i, row) for i, row in mine if row["primary"]), mine[0])
    require(row["skipped"] is None, f"{case}: skipped: {row['skipped']}")
    return index, row


def _other(row: Json, arms: Sequence[str]) -> str:
    return next((str(found["arm"]) for found in row["comparisons"]), arms[0])


def _of_row(report: CellReport, row: Json, arm: str, what: str) -> str:
    """Write one number of a row: of the arm, of its comparison, of a launch, or published."""
    mine, unit = row["arms"][arm], row["unit"]
    found: Json | None = next((c for c in row["comparisons"] if c["arm"] == arm), None)
    known = {
        name: f"{value_text(mine[name], unit)} {unit_name(unit)}" for name in ("median", "q1", "q3")
    }
    known["runs"] = str(mine["n"])
    if found is not None:
        known |= {name: form(found) for name, form in COMPARED.items()}
    known |= _published(report.cell, row, arm)
    known |= {name: _number(number) for name, number in _launch(report, row["case"], arm).items()}
    text = known[_one_of("number", what, known)]
    require(not text.startswith(UNKNOWN), f"{row['case']}: {what} of {arm} is not known")
    return text


COMPARED: dict[str, Callable[[Json], str]] = {
    "delta": lambda found: percent_text(found["effect_pct"]),
    "interval": lambda found: f"{interval_text(found['ci_low_pct'], found['ci_high_pct'])} %",
    "p": lambda found: p_text(found["p"]),
    "adjusted_p": lambda found: p_text(found["p_adjusted"]),
    "verdict": lambda found: verdict_text(found["verdict"]),
    "sees": lambda found: percent_text(found["mde_pct"]).lstrip("+"),
    "wins": lambda found: f"{found['wins']} of {found['blocks']} blocks",
}


def _published(cell: Json, row: Json, arm: str) -> dict[str, str]:
    """Write what an article published of an arm in a row."""
    published = cell["published"] or {}
    same = (
        one
        for one in published.get("rows") or ()
        if one["case"] == row["case"] and one.get("metric", published["metric"]) == row["metric"]
    )
    theirs: Json = next(same, {})
    known = {}
    if arm in (theirs.get("arms") or {}):
        unit = unit_name(theirs.get("unit", published.get("unit")))
        known["published"] = f"{theirs['arms'][arm]:,} {unit}"
    if arm in (theirs.get("delta_pct") or {}):
        known["published_delta"] = percent_text(theirs["delta_pct"][arm])
    return known


def _launch(report: CellReport, case: str, arm: str) -> dict[str, float]:
    """Return what a launch of a case counted and noted: medians over the arm's runs."""
    notes = [c.notes for r in report.records if r.arm == arm for c in r.cases if c.case == case]
    seen: dict[str, list[float]] = {}
    for note in notes:
        for name, number in {**note, **(note.get("counters") or {})}.items():
            if isinstance(number, int | float):
                seen.setdefault(name, []).append(number)
    return {name: float(median(numbers)) for name, numbers in seen.items()}


def _number(value: float) -> str:
    """Write what was counted as it is, and what was measured as tables do."""
    return f"{value:,.0f}" if float(value).is_integer() else value_text(value)


def _linked(column: Column[ResultLine], page: str) -> Column[ResultLine]:
    """Return a column of results whose numbers lead to their runs on the page."""
    if column.link is None:
        return column
    link, text = column.link, column.text

    def value(line: ResultLine) -> str:
        return f"[{shown}]({page}{link(line)})" if (shown := text(line)) else ""

    return replace(column, value=value, format=text_or_empty)


def _one_of(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is known; else refuse it with the nearest one."""
    names = list(known)
    if name in names:
        return name
    hint = did_you_mean(name, names) or f"; there are: {', '.join(names)}"
    raise ArticleError(f"no {kind} {name!r}{hint}")


def _beginning(kind: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    found = [one for one in names if one.startswith(name)]
    return found[0] if found and name not in names else _one_of(kind, name, names)


def require(condition: bool, message: str) -> None:
    """Raise ``ArticleError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ArticleError(message)
