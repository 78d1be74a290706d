"""From records to verdicts: statistics, gates, tables, plots and reports.

The package only reads a study's files and never runs an arm. Modules are loaded on first use, so
importing the package costs nothing (pandas, matplotlib, rich and jinja2 are imported when needed).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import analyse_cell
    from labkit.analysis.pages.report_files import write_cell, write_study
    from labkit.analysis.pages.terminal_report import print_cell
    from labkit.analysis.studies.data_frames import load
    from labkit.analysis.studies.study_analysis import exit_code

__all__ = ["analyse_cell", "exit_code", "load", "print_cell", "write_cell", "write_study"]

_HOMES = {
    "analyse_cell": "comparison.cell_analysis",
    "write_cell": "pages.report_files",
    "load": "studies.data_frames",
    "exit_code": "studies.study_analysis",
    "write_study": "pages.report_files",
    "print_cell": "pages.terminal_report",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first access."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
