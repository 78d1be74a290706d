"""Placeholders of an article: calls that return tables, numbers and figures of studies.

A placeholder cannot be filled, and raises :class:`ArticleError`, if its row was skipped, blocks are
missing, a gate failed, or a name does not exist (the message suggests the nearest known name).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from statistics import median
from typing import Any

from labkit.analysis.document.report_parts import TablePart
from labkit.analysis.document.table_model import Column, Table, text_or_empty
from labkit.analysis.findings.effect_wording import verdict_word
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import (
    UNKNOWN,
    interval_text,
    p_text,
    percent_text,
    unit_name,
    value_text,
)
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.markdown_report import markdown_table
from labkit.analysis.pages.report_files import PAGES, report_dir, url
from labkit.analysis.pages.report_sections import MARKDOWN_SECTIONS
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.analysis.studies.study_answer_sentence import study_answer
from labkit.analysis.tables.published_vs_measured import published_source, published_text
from labkit.analysis.tables.results_table import ResultLine
from labkit.config.option_index import did_you_mean
from labkit.records import ARCHIVE_SUFFIX, StudyPath, open_study

COUNTED_UNITS = ("tokens", "requests", "steps")
BRACKETS = str.maketrans("[]", "()")  # the text of a link has no brackets


class ArticleError(Exception):
    """A placeholder cannot be filled. The message is a single line."""


@dataclass(frozen=True)
class ArticleBlock:
    """Markdown on lines of its own: a table or a sentence."""

    text: str


@dataclass(frozen=True)
class ArticleLink:
    """A link or a picture within a line; ``target`` is the path that it leads to."""

    text: str
    target: str
    picture: bool = False


class PlaceholderFunctions:
    """The functions that placeholders call; a study is in the article's folder or one above it."""

    def __init__(self, folder: Path, analysis_cache: AnalysisCache) -> None:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._folder, self._analysis_cache = folder, analysis_cache
        self._opened: dict[Path, StudyPath] = {}
        self._calls: dict[str, Callable[..., ArticleBlock | ArticleLink]] = {
            name: getattr(self, name)
            for name in ("table", "answer", "machine", "settings", "value", "figure", "sentence")
        }
        self._sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined)

    def fill(self, call: str) -> ArticleBlock | ArticleLink:
        """Return a placeholder's result; raise :class:`ArticleError` or :class:`RecordError`."""
        from jinja2 import TemplateError

        name = call.partition("(")[0].strip()
        _one_of("placeholder", name, self._calls)
        try:
            expression = self._sandbox.compile_expression(call, undefined_to_none=False)
            result: Any = expression(**self._calls)
        except (TemplateError, TypeError) as error:
            raise ArticleError(f"{call}: {' '.join(str(error).split())}") from None
        if not isinstance(result, ArticleBlock | ArticleLink):
            raise ArticleError(f"{call}: the placeholder must be one call of {name}()")
        return result

    def table(
        self,
        study: str,
        columns: Sequence[str] | None = None,
        cell: str | None = None,
        links: bool = True,
        section: str | None = None,
        number: int = 1,
        rows: Sequence[str] | None = None,
    ) -> ArticleBlock:
        """Return the results table of a study's cell, or a table of a section of its report.

        ``columns`` selects columns by heading or by a heading's beginning; None selects all.
        ``number`` counts the section's tables, and ``rows`` selects the lines with such a text.
        """
        report, page = self._report(study, cell)
        table: Table[Any] = report.results
        if section is not None:
            titles = {one.title: one for one in MARKDOWN_SECTIONS}
            parts = titles[_one_of("section", section, titles)].parts(report)
            tables = [part.table for part in parts if isinstance(part, TablePart)]
            require(0 < number <= len(tables), f"{section} has no table {number}")
            table = tables[number - 1]
        selected = list(table.columns)
        if columns is not None:
            headings = [column.heading for column in selected]
            names = [_one_starting_with("column", name, headings) for name in columns]
            twice = next((name for name in names if headings.count(name) > 1), None)
            require(twice is None, f"several columns have the heading {twice!r}")
            selected = [selected[headings.index(name)] for name in names]
        if links:
            selected = [_linked(column, page) for column in selected]
        if rows is not None:
            table = replace(table, lines=tuple(_selected_lines(table, rows)))
        text = markdown_table(replace(table, columns=tuple(selected)))
        return ArticleBlock(text + _repeated(study, report))

    def settings(self, study: str, row: str | None = None, cell: str | None = None) -> ArticleBlock:
        """Return the table of a sweep's settings in the primary row ``row``, or the first one."""
        report, _ = self._report(study, cell)
        names = [report.cell.row_name(best) for best in report.cell.best or ()]
        require(bool(names), f"{study} is not a sweep, so it has no settings")
        index = 0 if row is None else names.index(_one_of("row", row, names))
        table = report.settings[index]
        text = "\n\n".join([markdown_table(table), *table.notes])
        return ArticleBlock(text + _repeated(study, report))

    def answer(self, study: str, cell: str | None = None) -> ArticleLink:
        """Return the answer of a study, or of one of its cells, in at most 20 words, as a link."""
        if cell is not None:
            report, page = self._report(study, cell)
            return ArticleLink(report.short_answer.translate(BRACKETS), page)
        reports = self._valid_reports(study)
        text = study_answer([cell_summary(report.analysis) for report in reports])
        return ArticleLink(text.translate(BRACKETS), self._page(study, self._study(study)))

    def machine(self, study: str) -> ArticleLink:
        """Return the machines that ran a study and the versions of its software, as a link."""
        lines = dict.fromkeys(report.machine[0] for report in self._valid_reports(study))
        text = "; ".join(line.removeprefix("Machine: ").rstrip(".") for line in lines)
        return ArticleLink(text, self._page(study, self._study(study)))

    def sentence(self, study: str, what: str = "answer", cell: str | None = None) -> ArticleBlock:
        """Return a sentence of the study's report; ``what`` is a key of ``SENTENCES``."""
        report, _ = self._report(study, cell)
        text = SENTENCES[_one_of("sentence", what, SENTENCES)](report)
        if text is None:
            raise ArticleError(f"the report of {study} has no sentence {what!r}")
        return ArticleBlock(text)

    def figure(self, study: str, file: str, caption: str = "") -> ArticleLink:
        """Return a picture of the study; ``file`` is a path within the study's folder."""
        self._valid_reports(study)
        folder = report_dir(self._study(study))
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
        """Return number ``what`` of an arm in the row of ``case``, as a link to its runs.

        If ``case`` is None, ``what`` is the name of a counter of the arm. ``arm`` defaults to the
        first arm compared in the row, or to the baseline for a counter.
        """
        report, page = self._report(study, cell)
        arms = [one.name for one in report.cell.arms]
        named = _one_of("arm", arm, arms) if arm is not None else None
        if case is None:
            known = report.cell.counters[named or arms[0]]
            return ArticleLink(_number_text(known[_one_of("counter", what, known)]), page)
        index, row = _row(report.cell, case, metric)
        compared = (one.arm for one in row.comparisons)
        text = _row_number(report, row, named or next(compared, arms[0]), what)
        return ArticleLink(text, f"{page}#{report.anchor}r{index}")

    def _report(self, study: str, cell: str | None) -> tuple[CellReport, str]:
        """Return a cell's report and a link to its page; raise :class:`ArticleError` if invalid."""
        folder = self._study(study)
        reports = {report.analysis.name: report for report in self._reports(folder)}
        several = f"{study} has several cells; cell= must be one of: {', '.join(reports)}"
        require(cell is not None or len(reports) == 1, several)
        name = next(iter(reports)) if cell is None else _one_of("cell", cell, reports)
        _require_valid(reports[name], study)
        page = report_dir(folder) / PAGES / f"{reports[name].analysis.data.dir.name}.html"
        if page.is_file():  # a study of many cells: each has a page, on which it is the first
            return replace(reports[name], anchor="cell0"), self._link(page)
        return reports[name], self._page(study, folder)

    def _page(self, study: str, folder: Path) -> str:
        page = report_dir(folder) / "report.html"
        if not page.is_file() and folder.is_file():
            page = folder  # the archive has the records
        require(page.is_file(), f"{study} has no report.html; run: python -m labkit.report {study}")
        return self._link(page)

    def _valid_reports(self, study: str) -> list[CellReport]:
        """Return the reports of a study's cells, each of which is complete and has its gates."""
        reports = list(self._reports(self._study(study)))
        for report in reports:
            _require_valid(report, study)
        return reports

    def _reports(self, path: Path) -> Iterable[CellReport]:
        if path not in self._opened:  # an archive is checked once
            self._opened[path] = open_study(path)
        for index, analysis in enumerate(self._analysis_cache.study(self._opened[path])):
            yield CellReport(analysis, anchor=f"cell{index}")

    def _study(self, study: str) -> Path:
        for folder in (self._folder, *self._folder.parents):
            path = folder / study
            if path.is_dir() or (path.is_file() and path.suffix == ARCHIVE_SUFFIX):
                return path
        raise ArticleError(f"{study}: no such study in the article's folder or above it")

    def compares(self, study: str) -> bool:
        """Return whether a study compares arms, so that it can be repeated."""
        return any(map(_compares, self._reports(self._study(study))))

    def from_root(self, article: Path, study: str) -> str:
        """Return an article's path from the folder that a study's name starts in."""
        root = self._study(study).parents[len(PurePath(study).parts) - 1]
        return os.path.relpath(article.resolve(), root).replace(os.sep, "/")

    def _link(self, path: Path) -> str:
        return url(os.path.relpath(path, self._folder).replace(os.sep, "/"))


def repeat_line(source: str) -> str:
    """Return the line below a table that repeats it: an archive, or all tables of an article."""
    return f"Repeat it: `python -m labkit.replicate {source}`"


def _repeated(study: str, report: CellReport) -> str:
    archived = study.endswith(ARCHIVE_SUFFIX) and _compares(report)
    return f"\n\n{repeat_line(study)}" if archived else ""


def _compares(report: CellReport) -> bool:
    return any(
        row.comparison(arm)
        for row in report.cell.primary_rows
        for arm in report.cell.treatment_arms
    )


SENTENCES: dict[str, Callable[[CellReport], str | None]] = {
    "question": lambda report: report.cell.title,
    "answer": lambda report: f"**{report.answer}**",
    "control": lambda report: next((x for x in report.notes if x.startswith("A/A control")), None),
    "machine": lambda report: report.machine[0],
    "published": lambda report: published_source(report.cell),
}


def _require_valid(report: CellReport, study: str) -> None:
    for name, gate in report.analysis.cell.gates.items():
        why = "; ".join(gate.reasons[:1])
        require(gate.status != "fail", f"{study}: the gate {name} failed: {why}")
    require(
        report.analysis.data.complete,
        f"{study}: some blocks have not run; repeat the study's command",
    )


def _row(cell: Cell, case: str, metric: str | None) -> tuple[int, Row]:
    rows = list(enumerate(cell.rows))
    name = _one_of("case", case, [row.case for _, row in rows])
    matches = [(i, row) for i, row in rows if row.case == name]
    if metric is not None:
        known = _one_of("metric", metric, [str(row.metric) for _, row in matches])
        matches = [(i, row) for i, row in matches if row.metric == known]
    index, row = next((pair for pair in matches if pair[1].primary), matches[0])
    require(row.skipped is None, f"{case}: skipped: {row.skipped}")
    return index, row


def _row_number(report: CellReport, row: Row, arm: str, what: str) -> str:
    """Return number ``what`` of an arm, its comparison, its launches or an article, as text."""
    values, comparison = row.arms[arm], row.comparison(arm)
    texts: dict[str, str] = {}
    for name in ("median", "q1", "q3"):
        value, counted = getattr(values, name), row.unit in COUNTED_UNITS
        number = _number_text(value) if counted else value_text(value, row.unit)
        texts[name] = f"{number} {unit_name(row.unit)}"
    texts["runs"] = str(values.n)
    if comparison is not None:
        texts |= {name: text_of(comparison) for name, text_of in COMPARISON_FORMATS.items()}
        texts["verdict"] = verdict_word(row, comparison.verdict)
    texts |= _published_numbers(report.cell, row, arm)
    launch_numbers = _launch_numbers(report, row.case, arm)
    texts |= {name: _number_text(number) for name, number in launch_numbers.items()}
    text = texts[_one_of("number", what, texts)]
    require(not text.startswith(UNKNOWN), f"{row.case}: {what} of {arm} is not known")
    return text


COMPARISON_FORMATS: dict[str, Callable[[Comparison], str]] = {
    "delta": lambda comparison: percent_text(comparison.effect_pct),
    "interval": lambda one: f"{interval_text(one.ci_low_pct, one.ci_high_pct)} %",
    "p": lambda comparison: p_text(comparison.p),
    "adjusted_p": lambda comparison: p_text(comparison.p_adjusted),
    "sees": lambda comparison: percent_text(comparison.mde_pct).lstrip("+"),
    "wins": lambda comparison: (
        UNKNOWN if comparison.wins is None else f"{comparison.wins} of {comparison.blocks} blocks"
    ),
}


def _published_numbers(cell: Cell, row: Row, arm: str) -> dict[str, str]:
    rows = (r for r in cell.published_rows if (r.case, r.metric) == (row.case, row.metric))
    published = next(rows, None)
    texts: dict[str, str] = {}
    if published is not None and arm in published.arms:
        number = published_text(published.arms[arm], published.unit)
        texts["published"] = f"{number} {unit_name(published.unit)}"
    if published is not None and arm in published.delta_pct:
        texts["published_delta"] = percent_text(published.delta_pct[arm])
    return texts


def _launch_numbers(report: CellReport, case: str, arm: str) -> dict[str, float]:
    """Return the counters and numbers that an arm's runs noted for a case, as medians over runs."""
    values: dict[str, list[float]] = {}
    for one in (c for r in report.records if r.arm == arm for c in r.cases if c.case == case):
        for name, value in _flat({**one.notes, **(one.known_notes.get("counters") or {})}):
            values.setdefault(name, []).append(value)
    return {name: float(median(numbers)) for name, numbers in values.items()}


def _flat(note: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a note and of the notes in it: ``video.frames_decoded``."""
    for name, value in note.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield prefix + name, value


def _number_text(value: float) -> str:
    """Return a whole number with all its digits, and any other number as tables print it."""
    return f"{value:,.0f}" if float(value).is_integer() else value_text(value)


def _selected_lines(table: Table[Any], rows: Sequence[str]) -> Iterator[Any]:
    """Return the lines of a table one of whose columns of text has one of the texts ``rows``."""
    names = [column for column in table.columns if not column.numeric]
    texts = [{column.text(line) for column in names} for line in table.lines]
    for row in rows:
        _one_of("row", row, sorted(set().union(*texts)))
    return (line for line, has in zip(table.lines, texts, strict=True) if has & {*rows})


def _linked(column: Column[ResultLine], page: str) -> Column[ResultLine]:
    if column.link is None:
        return column
    link, text = column.link, column.text

    def value(line: ResultLine) -> str:
        number, target = text(line), link(line)  # that of a file is from the page's folder
        return f"[{number}]({page}{target})" if number and target.startswith("#") else number

    return replace(column, value=value, format=text_or_empty)


def _one_of(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is known, else raise :class:`ArticleError` with the nearest name."""
    names = list(known)
    if name in names:
        return name
    hint = did_you_mean(name, names) or f"; it must be one of: {', '.join(names)}"
    raise ArticleError(f"there is no {kind} {name!r}{hint}")


def _one_starting_with(kind: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    matches = [candidate for candidate in names if candidate.startswith(name)]
    return matches[0] if matches and name not in names else _one_of(kind, name, names)


def require(condition: bool, message: str) -> None:
    """Raise ``ArticleError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ArticleError(message)
