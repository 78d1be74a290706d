"""Write a study's report files, and render a study in any format."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import quote

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.exports.tool_exports import (
    FormatError,
    benchstat,
    csv_text,
    github,
    latex_text,
    pyperf,
    vllm,
)
from labkit.analysis.model.study_model import Study
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.html_report import cell_html, overview_html, study_html
from labkit.analysis.pages.markdown_report import markdown_table, study_markdown
from labkit.analysis.pages.study_overview import machine_overviews
from labkit.analysis.studies.cell_summary import (
    CellSummary,
    cell_headings,
    cell_summary,
    files_state,
    read_stored,
    store,
)
from labkit.analysis.studies.study_analysis import (
    MAX_RECORDS,
    AnalysisCache,
    study_name,
    summarise_study,
)
from labkit.analysis.studies.study_discovery import cell_dirs
from labkit.analysis.text_format import slug
from labkit.records import (
    ArchivePath,
    RecordError,
    StudyPath,
    is_locked,
    open_study,
    read_cell,
    read_json,
    write_json,
)
from labkit.records.atomic_write import atomic_write

MAX_PROCESSES = 4  # each takes up to 0.4 GB
CELLS_PER_TASK = 8  # of a process
MAX_CELLS_ON_PAGE = 50  # a cell takes up to 0.5 MB of the page, and 20 MB of memory
PAGES = "cells"  # the folder of the pages of a study with more cells
PAGES_NOTE = (
    f"The page of each cell is in the folder {PAGES}. Pictures in files are drawn on request: "
    "python -m labkit.report STUDY/CELL."
)

__all__ = ["FORMATS", "FormatError", "render", "write_cell", "write_study"]


def write_cell(cell_dir: str | Path, analysis_cache: AnalysisCache | None = None) -> dict[str, Any]:
    """Analyse one cell, write its ``cell.json`` and return it; raises :class:`RecordError`.

    A lost ``cell.json`` is not written again.
    """
    return _write_cell((analysis_cache or AnalysisCache()).cell(Path(cell_dir)))


def _write_cell(analysis: CellAnalysis) -> dict[str, Any]:
    cell, folder = analysis.cell, analysis.data.dir
    # An archive is never changed. A process that holds the lock writes the file itself. What was
    # inferred in place of a lost file must not be taken for the design that was declared.
    if isinstance(folder, ArchivePath) or is_locked(folder) or not analysis.data.design.declared:
        return cell.to_json()
    path = folder / "cell.json"
    old_design = read_cell(folder)["design"] if path.is_file() else {}
    # The runner may have added this key after the analysis read the file: keep it.
    if "looks_taken" in old_design:
        design = cell.design.with_keys(looks_taken=old_design["looks_taken"])
        cell = replace(cell, design=design)
    content = cell.to_json()
    write_json(path, content)
    return content


def report_dir(study: str | Path) -> Path:
    """Return the folder of a study's reports: its own, or ``STUDY.report`` beside an archive."""
    path = Path(study)
    return path.with_suffix(".report") if path.is_file() else path


def study_link(root: Path, study: Path) -> str:
    """Return a Markdown link from a folder to the report of a study in it, or to the study."""
    name = study.relative_to(root).as_posix() if study != root else study.resolve().name
    pages = (report_dir(study) / page for page in ("report.html", "report.md"))
    target = next((page for page in pages if page.is_file()), study)
    return f"[{name}]({url(target.relative_to(root).as_posix())})"


def url(path: str) -> str:
    """Return a relative path as a link."""
    return quote(path, safe="/=,+~._-")


def write_study(
    study_dir: str | Path,
    plots: bool = True,
    analysis_cache: AnalysisCache | None = None,
    processes: int = 1,
) -> Study:
    """Write every derived file: ``cell.json``, ``study.json``, reports, tables and plots.

    In a study of more than ``MAX_CELLS_ON_PAGE`` cells, each cell has a page of its own in the
    folder ``cells``, without pictures in files; a cell that is unchanged since then keeps its page.

    Parameters
    ----------
    study_dir
        The study's folder or its archive. The files of an archive are written into
        :func:`report_dir`, without ``cell.json``.
    plots
        Whether to draw the pictures (about 0.5 s each).
    analysis_cache
        Cached analyses, which are reused.
    processes
        How many processes may write cells' own pages, each several cells (at most MAX_PROCESSES).
        With more than 1, the calling program must be importable, as :mod:`multiprocessing` says.

    Raises
    ------
    RecordError
        A file of a cell is not valid, or a folder to write to is a link. Nothing has been written;
        with pages of their own, only the cells before it.
    """
    opened, folder = open_study(study_dir), report_dir(study_dir)
    cache, paths = analysis_cache or AnalysisCache(MAX_RECORDS), cell_dirs(opened)
    derived = (folder / name for name in ("tables", "plots", PAGES))
    _refuse_links((*paths, *derived), within=folder)
    if len(paths) > MAX_CELLS_ON_PAGE:
        return _write_many(opened, paths, folder, plots, cache, processes)
    analyses = [cache.cell(path) for path in paths]
    for analysis in analyses:
        _write_cell(analysis)
    cells, reports = list(map(cell_summary, analyses)), _reports(opened, analyses)
    study = summarise_study(opened, cells)
    folder.mkdir(exist_ok=True)
    write_json(folder / "study.json", study.to_json())
    (folder / "tables").mkdir(exist_ok=True)
    for report, heading in zip(reports, cell_headings(cells), strict=True):
        _write_tables(report, heading, folder / "tables")
    write_text(folder / "report.md", study_markdown(cells, reports))
    write_text(folder / "report.html", study_html(study.study, cells, reports))
    if plots:
        _write_plots(cells, reports, folder / "plots")
    return study


def _write_many(
    opened: StudyPath,
    paths: Sequence[StudyPath],
    folder: Path,
    plots: bool,
    cache: AnalysisCache,
    processes: int,
) -> Study:
    """Write a study whose cells have pages of their own, cell by cell: only one is in memory."""
    for name in ("", "tables", PAGES):
        (folder / name).mkdir(exist_ok=True)
    stored = {path: read_stored(folder / PAGES / path.name, path) for path in paths}
    changed = [path for path, cell in stored.items() if cell is None]
    pages = _write_pages(opened, changed, folder, cache, processes)
    written = dict(zip(changed, pages, strict=True))
    cells = [stored[path] or written[path] for path in paths]
    for path, cell in zip(paths, cells, strict=True):
        cache.count(path, cell.unlisted, cell.entry.runs)
    known = None if changed else _known_study(folder)
    study = summarise_study(opened, cells, known)
    if study != known:
        write_json(folder / "study.json", study.to_json())
    links = [url(f"{PAGES}/{path.name}.html") for path in paths]
    write_text(folder / "report.html", overview_html(study.study, cells, links, PAGES_NOTE))
    write_text(folder / "report.md", study_markdown(cells, (), PAGES_NOTE))
    if plots:
        _write_plots(cells, (), folder / "plots")
    return study


def _write_pages(
    opened: StudyPath,
    paths: Sequence[StudyPath],
    folder: Path,
    cache: AnalysisCache,
    processes: int,
) -> Iterator[CellSummary]:
    """Write what is derived from each cell; with many cells, in several processes."""
    names = [path.name for path in paths]
    tasks = [names[i : i + CELLS_PER_TASK] for i in range(0, len(names), CELLS_PER_TASK)]
    workers = min(processes, MAX_PROCESSES, len(tasks))
    if workers < 2:
        yield from (_write_page(opened, path, folder, cache) for path in paths)
        return
    study = opened.file if isinstance(opened, ArchivePath) else opened
    ignore = signal.SIGINT, signal.SIG_IGN  # this process ends the others
    pool = ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, ignore)
    try:
        yield from chain.from_iterable(pool.map(_write_task, repeat(study), tasks, repeat(folder)))
    finally:
        pool.shutdown(cancel_futures=True)


def _write_task(study: Path, names: Sequence[str], folder: Path) -> list[CellSummary]:
    """Write what is derived from some cells, in a process of its own."""
    opened, cache = open_study(study), AnalysisCache(MAX_RECORDS // MAX_PROCESSES)
    return [_write_page(opened, opened / name, folder, cache) for name in names]


def _write_page(
    opened: StudyPath, path: StudyPath, folder: Path, cache: AnalysisCache
) -> CellSummary:
    """Write what is derived from one cell: its ``cell.json``, tables and pages."""
    page, before = folder / PAGES / path.name, files_state(path)
    analysis = cache.cell(path)
    _write_cell(analysis)
    cell, (report,) = cell_summary(analysis), _reports(opened, [analysis], below=f"{PAGES}/")
    _write_tables(report, f"{cell.title} ({report.cell.name})", folder / "tables")
    text = cell_html(study_name(opened), cell, report, f"{path.name}.md")
    write_text(page.with_name(f"{path.name}.html"), text)
    write_text(page.with_name(f"{path.name}.md"), study_markdown([cell], [report]))
    store(page, path, before, cell)
    return cell


def _known_study(folder: Path) -> Study | None:
    """Return the study as it was last written; None if that cannot be read: it is derived."""
    try:
        return Study.from_json(read_json(folder / "study.json"))
    except (RecordError, OSError, KeyError, TypeError, ValueError):
        return None


def _reports(
    opened: StudyPath, analyses: Sequence[CellAnalysis], below: str = ""
) -> list[CellReport]:
    """Return the cells' reports. ``below``: the folder of their page, relative to the study's."""
    up = "../" * below.count("/")

    def record_folder(cell_dir: StudyPath) -> str:
        if isinstance(opened, ArchivePath):  # the archive lies beside the folder of reports
            return f"{up}../{opened.file.name}#{cell_dir.name}/"
        return up if cell_dir == opened else f"{up}{cell_dir.name}/"

    return [
        CellReport(analysis, record_folder(analysis.data.dir), f"cell{index}")
        for index, analysis in enumerate(analyses)
    ]


def _refuse_links(paths: Iterable[StudyPath], within: Path) -> None:
    """Refuse links in somebody's study, which would lead to files of somebody else."""
    for path in paths:
        if isinstance(path, Path) and path != within and path.is_symlink():
            why = "is a link, and reports are written to folders only; remove it"
            raise RecordError(f"{path} {why}")


def _write_tables(report: CellReport, caption: str, folder: Path) -> None:
    stem = folder / slug(report.cell.cell)
    write_text(Path(f"{stem}.csv"), csv_text([report.cell]))
    write_text(Path(f"{stem}.md"), markdown_table(report.results) + "\n")
    write_text(Path(f"{stem}.tex"), latex_text(report.results, caption))


def _write_plots(cells: Sequence[CellSummary], reports: Sequence[CellReport], folder: Path) -> None:
    from labkit.analysis.pages.matplotlib_figures import write_figure, write_figures

    folder.mkdir(exist_ok=True)
    for report in reports:
        write_figures(report, folder)
    for overview in (one for one in machine_overviews(cells) if one.curves):
        write_figure([overview.load_chart], folder / overview.stem)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def _markdown(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    return study_markdown(list(map(cell_summary, analyses)), _reports(folder, analyses))


def _html(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    cells = list(map(cell_summary, analyses))
    return study_html(study_name(folder), cells, _reports(folder, analyses))


def _latex(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    captions = cell_headings(list(map(cell_summary, analyses)))
    tables = (CellReport(analysis).results for analysis in analyses)
    return "\n".join(map(latex_text, tables, captions))


_RENDERERS: dict[str, Callable[[StudyPath, Sequence[CellAnalysis]], str]] = {
    "md": _markdown,
    "html": _html,
    "tex": _latex,
    "csv": lambda folder, analyses: csv_text([analysis.cell for analysis in analyses]),
    "benchstat": lambda folder, analyses: benchstat(analyses),
    "pyperf": lambda folder, analyses: pyperf(analyses),
    "vllm": lambda folder, analyses: vllm(analyses),
    "github": lambda folder, analyses: github(analyses),
}
FORMATS = tuple(_RENDERERS)


def render(folder: Path, format_name: str, analysis_cache: AnalysisCache | None = None) -> str:
    """Return a study in one of :data:`FORMATS`, with cached analyses if there are any.

    Raises ``RecordError`` if the study cannot be read, and ``FormatError`` if it lacks what this
    format needs.
    """
    opened = open_study(folder)
    analyses = (analysis_cache or AnalysisCache()).study(opened)
    return _RENDERERS[format_name](opened, analyses)
