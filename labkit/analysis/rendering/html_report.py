"""``report.html``: the whole study as one self-contained page that loads no other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import count_text
from labkit.analysis.rendering.cell_report_content import CellReport
from labkit.analysis.rendering.report_sections import HTML_SECTIONS
from labkit.analysis.rendering.study_overview import machine_overviews
from labkit.records import ArchivePath, StudyPath

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "templates"


def study_html(
    study: Mapping[str, Any], analyses: Sequence[CellAnalysis], study_dir: StudyPath
) -> str:
    """Return the HTML report of a study. Links to records are relative to ``study_dir``."""
    return _template().render(
        study=study,
        count=count_text,
        overviews=machine_overviews(study, analyses),
        sections=HTML_SECTIONS,
        reports=[
            CellReport(analysis, _record_folder(analysis, study_dir), f"cell{index}")
            for index, analysis in enumerate(analyses)
        ],
    )


def _record_folder(analysis: CellAnalysis, study_dir: StudyPath) -> str:
    if isinstance(study_dir, ArchivePath):  # which lies beside the folder of reports
        return f"../{study_dir.file.name}#{analysis.data.dir.name}/"
    return "" if analysis.data.dir == study_dir else f"{analysis.data.dir.name}/"


@cache
def _template() -> Template:
    """Return the compiled template. It is cached, because compiling takes as long as rendering."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.j2")
