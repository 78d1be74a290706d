"""Write a study's report files, and render a study in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.exports.csv_latex import csv_text, latex_text
from labkit.analysis.exports.tool_exports import FormatError, benchstat, github, pyperf, vllm
from labkit.analysis.model.study_model import Study
from labkit.analysis.number_format import slug
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.html_report import study_html
from labkit.analysis.pages.markdown_report import markdown_table, study_markdown
from labkit.analysis.pages.study_overview import machine_overviews
from labkit.analysis.studies.study_analysis import AnalysisCache, summarise_study
from labkit.records import (
    ArchivePath,
    RecordError,
    StudyPath,
    is_locked,
    open_study,
    read_cell,
    write_json,
)
from labkit.records.atomic_write import atomic_write

__all__ = ["FORMATS", "FormatError", "render", "write_cell", "write_study"]


def write_cell(cell_dir: str | Path, analysis_cache: AnalysisCache | None = None) -> dict[str, Any]:
    """Analyse one cell, write its ``cell.json`` and return it; raises :class:`RecordError`."""
    return _write_cell((analysis_cache or AnalysisCache()).cell(Path(cell_dir)))


def _write_cell(analysis: CellAnalysis) -> dict[str, Any]:
    cell, folder = analysis.cell, analysis.data.dir
    # An archive is never changed. A process that holds the lock writes the file itself.
    if isinstance(folder, ArchivePath) or is_locked(folder):
        return cell.to_json()
    path = folder / "cell.json"
    old_design = read_cell(folder)["design"] if path.is_file() else {}
    # The runner may have added this key after the analysis read the file: keep it.
    if "looks_taken" in old_design:
        looks_taken = old_design["looks_taken"]
        cell = replace(cell, design=cell.design.with_keys(looks_taken=looks_taken))
    content = cell.to_json()
    write_json(path, content)
    return content


def report_dir(study: str | Path) -> Path:
    """Return the folder of a study's reports: its own, or ``STUDY.report`` beside an archive."""
    path = Path(study)
    return path.with_suffix(".report") if path.is_file() else path


def write_study(
    study_dir: str | Path, plots: bool = True, analysis_cache: AnalysisCache | None = None
) -> list[CellAnalysis]:
    """Write every derived file: ``cell.json``, ``study.json``, reports, tables and plots.

    Parameters
    ----------
    study_dir
        The study's folder or its archive. The files of an archive are written into
        :func:`report_dir`, without ``cell.json``.
    plots
        Whether to draw the pictures (about 0.5 s each).
    analysis_cache
        Cached analyses, which are reused.

    Raises
    ------
    RecordError
        A file of a cell is not valid, or a folder to write to is a link. Nothing has been written.
    """
    opened, folder = open_study(study_dir), report_dir(study_dir)
    analyses = (analysis_cache or AnalysisCache()).study(opened)
    cells = [one.data.dir for one in analyses]
    _refuse_links((*cells, folder / "tables", folder / "plots"), within=folder)
    for analysis in analyses:
        _write_cell(analysis)
    study = summarise_study(opened, analyses)
    folder.mkdir(exist_ok=True)
    write_json(folder / "study.json", study.to_json())
    (folder / "tables").mkdir(exist_ok=True)
    for analysis in analyses:
        _write_tables(CellReport(analysis), folder / "tables")
    write_text(folder / "report.md", study_markdown(study, analyses))
    write_text(folder / "report.html", study_html(study, analyses, opened))
    if plots:
        _write_plots(study, analyses, folder / "plots")
    return analyses


def _refuse_links(paths: Iterable[StudyPath], within: Path) -> None:
    """Refuse links in somebody's study, which would lead to files of somebody else."""
    for path in paths:
        if isinstance(path, Path) and path != within and path.is_symlink():
            raise RecordError(
                f"{path} is a link, and reports are written to folders only; remove it"
            )


def _write_tables(report: CellReport, folder: Path) -> None:
    stem = folder / slug(report.cell.cell)
    write_text(Path(f"{stem}.csv"), csv_text([report.cell]))
    write_text(Path(f"{stem}.md"), markdown_table(report.results) + "\n")
    write_text(Path(f"{stem}.tex"), latex_text(report.results, report.title))


def _write_plots(study: Study, analyses: Sequence[CellAnalysis], folder: Path) -> None:
    from labkit.analysis.pages.matplotlib_figures import write_figure, write_figures

    folder.mkdir(exist_ok=True)
    for analysis in analyses:
        write_figures(CellReport(analysis), folder)
    for overview in machine_overviews(study, analyses):
        if overview.curves:
            write_figure([overview.load_chart], folder / overview.stem)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def _markdown(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    return study_markdown(summarise_study(folder, analyses), analyses)


def _html(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    return study_html(summarise_study(folder, analyses), analyses, folder)


def _latex(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    reports = map(CellReport, analyses)
    return "\n".join(latex_text(report.results, report.title) for report in reports)


def _csv(folder: StudyPath, analyses: Sequence[CellAnalysis]) -> str:
    return csv_text([analysis.cell for analysis in analyses])


_RENDERERS: dict[str, Callable[[StudyPath, Sequence[CellAnalysis]], str]] = {
    "md": _markdown,
    "html": _html,
    "tex": _latex,
    "csv": _csv,
    "benchstat": lambda folder, analyses: benchstat(analyses),
    "pyperf": lambda folder, analyses: pyperf(analyses),
    "vllm": lambda folder, analyses: vllm(analyses),
    "github": lambda folder, analyses: github(analyses),
}
FORMATS = tuple(_RENDERERS)


def render(folder: Path, format_name: str, analysis_cache: AnalysisCache | None = None) -> str:
    """Return a study in one of :data:`FORMATS`, with cached analyses if there are any.

    Raises
    ------
    RecordError
        The study cannot be read.
    FormatError
        The study lacks what this format needs.
    """
    opened = open_study(folder)
    analyses = (analysis_cache or AnalysisCache()).study(opened)
    return _RENDERERS[format_name](opened, analyses)
