"""``report.html``: the whole study as one file that fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.number_format import count_text
from labkit.analysis.rendering.report_sections import PAGE, CellReport
from labkit.analysis.rendering.study_overview import overviews

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "templates"


def study_html(study: Mapping[str, Any], analyses: Sequence[CellAnalysis], study_dir: Path) -> str:
    """Return the report; links to records are relative to ``study_dir``."""
    return _template().render(
        study=study,
        count=count_text,
        overviews=overviews(study, analyses),
        page=PAGE,
        reports=[
            CellReport(analysis, _folder(analysis, study_dir), f"cell{index}")
            for index, analysis in enumerate(analyses)
        ],
    )


def _folder(analysis: CellAnalysis, study_dir: Path) -> str:
    return "" if analysis.data.dir == study_dir else f"{analysis.data.dir.name}/"


@cache
def _template() -> Template:
    """Read the page's template: compiling it takes as long as filling it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.j2")
