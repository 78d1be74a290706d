"""The forms that ``python -m labkit.report --format`` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.exports import FormatError, benchstat, github, pyperf, vllm
from labkit.analysis.rendering.csv_latex import csv_text, latex_text
from labkit.analysis.rendering.html import study_html
from labkit.analysis.rendering.markdown import study_markdown
from labkit.analysis.rendering.tables import cell_table
from labkit.analysis.study_analysis import analyse_study, study_json

__all__ = ["FORMATS", "FormatError", "render"]


def _markdown(folder: Path, analyses: Sequence[CellAnalysis]) -> str:
    return study_markdown(study_json(folder, analyses), analyses)


def _html(folder: Path, analyses: Sequence[CellAnalysis]) -> str:
    return study_html(study_json(folder, analyses), analyses, folder)


def _latex(folder: Path, analyses: Sequence[CellAnalysis]) -> str:
    return "\n".join(
        latex_text(cell_table(a.json, a.data.records), a.json["question"] or a.json["cell"])
        for a in analyses
    )


def _csv(folder: Path, analyses: Sequence[CellAnalysis]) -> str:
    return csv_text([analysis.json for analysis in analyses])


_RENDERERS: dict[str, Callable[[Path, Sequence[CellAnalysis]], str]] = {
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


def render(folder: Path, name: str) -> str:
    """Give a study in one of :data:`FORMATS`.

    Raises
    ------
    RecordError
        The study cannot be read.
    FormatError
        It has not what the form needs.
    """
    return _RENDERERS[name](folder, analyse_study(folder))
