"""A study: its cells analysed, and every table, plot and report written anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.analysis.answer import answer
from labkit.analysis.cell_analysis import CellAnalysis, analyse
from labkit.analysis.comparison import row_tests
from labkit.analysis.formatting import slug
from labkit.analysis.rendering.csv_latex import csv_text, latex_text
from labkit.analysis.rendering.html import study_html
from labkit.analysis.rendering.markdown import markdown_table, study_markdown
from labkit.analysis.rendering.tables import cell_table
from labkit.analysis.statistics.multiplicity import joint_p
from labkit.records import SCHEMA_VERSION, RecordError, write_json


def cell_dirs(study_dir: Path) -> list[Path]:
    """Find a study's cells, sorted by name; a cell's own folder is a study of one.

    Raises
    ------
    RecordError
        There is no such folder, or no cell in it.
    """
    if not study_dir.is_dir():
        raise RecordError(f"{study_dir}: no such directory")
    if (study_dir / "cell.json").is_file():
        return [study_dir]
    found = sorted(path.parent for path in study_dir.glob("*/cell.json"))
    if not found:
        raise RecordError(f"{study_dir}: no cell in it (a folder with cell.json and runs/)")
    return found


def analyse_study(study_dir: Path) -> list[CellAnalysis]:
    """Analyse every cell of a study; raises :class:`RecordError`."""
    return [analyse(path) for path in cell_dirs(Path(study_dir))]


def cell_status(analysis: CellAnalysis) -> int:
    """Give a cell's exit status: 0 if it is complete and every gate held, else 1."""
    held = all(gate.status != "fail" for gate in analysis.gates.values())
    return 0 if analysis.data.complete and held else 1


def exit_code(study_dir: str | Path) -> int:
    """Give a study's exit code: 0 if all cells ran and every gate held, else 1.

    Raises
    ------
    RecordError
        A file of a cell is not valid.
    """
    return max(cell_status(analysis) for analysis in analyse_study(Path(study_dir)))


def study_json(study_dir: Path, analyses: Sequence[CellAnalysis]) -> dict[str, Any]:
    """Give ``study.json``: the cells with their status, gates and verdicts.

    With several cells, ``family`` holds the p-values of all their primary rows adjusted as
    one family (max-T over joint relabellings, times the number of arms where several).
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study_dir.resolve().name,
        "exit_code": max(cell_status(analysis) for analysis in analyses),
        "cells": [_cell(analysis) for analysis in analyses],
        "family": study_family(analyses) if len(analyses) > 1 else [],
    }


def _cell(analysis: CellAnalysis) -> dict[str, Any]:
    cell = analysis.json
    words: dict[str, int] = {}
    for row in cell["rows"]:
        for found in row["comparisons"]:
            if row["primary"] and _role(cell, found["arm"]) == "arm":
                words[found["verdict"]] = words.get(found["verdict"], 0) + 1
    return {
        "cell": cell["cell"],
        "dir": analysis.data.dir.name,
        "question": cell["question"],
        "answer": answer(analysis),
        "status": cell_status(analysis),
        "complete": analysis.data.complete,
        "blocks": len(analysis.data.blocks_done),
        "runs": len(analysis.data.records),
        "failures": len(cell["failures"]),
        "gates": {name: gate["status"] for name, gate in cell["gates"].items()},
        "verdicts": words,
    }


def _role(cell: Mapping[str, Any], arm: str) -> str:
    return str(next(a["role"] for a in cell["arms"] if a["name"] == arm))


def study_family(analyses: Sequence[CellAnalysis]) -> list[dict[str, Any]]:
    """Adjust the primary rows of all cells as one family, arm by arm."""
    places, families = [], []
    widest = max(sum(a.role == "arm" for a in x.data.arms) for x in analyses)
    for analysis in analyses:
        data = analysis.data
        for arm in data.arms:
            if arm.role == "arm" and data.withheld is None:
                tests = row_tests(analysis.rows, arm.name, data.baseline, data.levels.runs, True)
                if tests:
                    places.append((analysis, arm.name, list(tests)))
                    families.append(list(tests.values()))
    adjusted = joint_p(families) if families else []
    return [
        {
            "cell": analysis.name,
            "case": analysis.rows[member].case,
            "metric": analysis.rows[member].metric,
            "arm": arm,
            "p_adjusted": min(1.0, widest * p),
        }
        for (analysis, arm, members), ps in zip(places, adjusted, strict=True)
        for member, p in zip(members, ps, strict=True)
    ]


def write_study(
    study_dir: str | Path, plots: bool = True, say: Callable[[str], None] = lambda what: None
) -> list[CellAnalysis]:
    """Write everything that is derived: cell.json, study.json, reports, tables and plots.

    Parameters
    ----------
    plots
        Whether pictures are drawn (about 0.5 s each).
    say
        Called with each file's name, for progress.

    Raises
    ------
    RecordError
        A file of a cell is not valid; nothing has been written by then.
    """
    folder = Path(study_dir)
    analyses = analyse_study(folder)
    for analysis in analyses:
        write_json(analysis.data.dir / "cell.json", analysis.json)
    study = study_json(folder, analyses)
    write_json(folder / "study.json", study)
    (folder / "tables").mkdir(exist_ok=True)
    for analysis in analyses:
        _write_tables(analysis, folder / "tables")
    write_text(folder / "report.md", study_markdown(study, analyses))
    write_text(folder / "report.html", study_html(study, analyses, folder))
    if plots:
        _write_plots(analyses, folder / "plots", say)
    return analyses


def _write_tables(analysis: CellAnalysis, folder: Path) -> None:
    cell = analysis.json
    stem = folder / slug(cell["cell"])
    table = cell_table(cell, analysis.data.records)
    write_text(Path(f"{stem}.csv"), csv_text([cell]))
    write_text(Path(f"{stem}.md"), markdown_table(table) + "\n")
    write_text(Path(f"{stem}.tex"), latex_text(table, cell["question"] or cell["cell"]))


def _write_plots(
    analyses: Iterable[CellAnalysis], folder: Path, say: Callable[[str], None]
) -> None:
    from labkit.analysis.rendering.figures import write_plots, write_roofline, write_timelines

    folder.mkdir(exist_ok=True)
    for analysis in analyses:
        cell, records = analysis.json, analysis.data.records
        for path in (
            *write_plots(cell, folder),
            *write_roofline(cell, records, folder),
            *write_timelines(cell, records, folder),
        ):
            say(path.name)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, by rename."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8", newline="\n")
    draft.replace(path)
