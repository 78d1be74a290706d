"""The player of traced steps: a part of the HTML report, and a page of its own.

The player shows one step at a time: the batch, the parts of its time, the KV blocks by owner, and
what each request does. It is an HTML element with its styles, its script and its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.document.report_parts import (
    TEMPLATES,
    CellSource,
    ReportPart,
    StepPlayer,
    section,
    templates,
)
from labkit.records import Record, StudyPath, read_step_trace

Json = Mapping[str, Any]
REPORT_BYTES = 600_000  # limit for the steps of all runs in a cell's report
PAGE_BYTES = 20_000_000


@dataclass(frozen=True)
class TracedRun:
    """A run and its steps, in the form of :mod:`labkit.records.step_trace_file` (``trace``)."""

    arm: str
    run: str
    trace: Json


def traced_records(records: Sequence[Record], arms: Sequence[str]) -> list[Record]:
    """Return the successful runs of ``arms`` that stored their steps, in the order of the arms."""
    stored = [r for r in records if r.ok and "file" in (r.known_notes.get("step_trace") or {})]
    return [record for arm in arms for record in stored if record.arm == arm]


def traced_run(record: Record, cell_dir: StudyPath) -> TracedRun:
    """Read the steps of a run; raises :class:`RecordError`."""
    trace = read_step_trace(cell_dir, record.known_notes["step_trace"])
    return TracedRun(record.arm, record.run, trace)


def first_traced_runs(report: CellSource) -> list[TracedRun]:
    """Return the first traced run of each arm except the control."""
    records = traced_records(report.records, report.cell.real_arms)
    first = {record.arm: record for record in reversed(records)}
    arms = dict.fromkeys(record.arm for record in records)
    return [traced_run(first[arm], report.analysis.data.dir) for arm in arms]


@section("A step, played")
def step_player_section(report: CellSource) -> Iterator[ReportPart]:
    """Show the steps of the first traced run of each arm except the control."""
    if runs := first_traced_runs(report):
        yield StepPlayer(_player_html(runs, REPORT_BYTES))


def _player_html(runs: Sequence[TracedRun], max_bytes: int) -> str:
    """Return the player as HTML. It leaves out each run's last steps to fit ``max_bytes``."""
    share = max_bytes // len(runs)
    # "<" could end the element that holds the data.
    data = json.dumps([_player_data(run, share) for run in runs], separators=(",", ":"))
    player = templates(trim_blocks=True).get_template("step_player.html.j2")
    text: str = player.render(
        runs=runs,
        data=data.replace("<", "\\u003c"),
        css=(TEMPLATES / "step_player.css").read_text("utf-8"),
        script=(TEMPLATES / "step_player.js").read_text("utf-8"),
    )
    return text


def _player_data(run: TracedRun, max_bytes: int) -> dict[str, Any]:
    size, steps = 0, list[Json]()
    for step in run.trace["steps"]:
        size += len(json.dumps(step, separators=(",", ":")))
        if size > max_bytes and steps:
            break
        steps.append(step)
    return {**run.trace, "arm": run.arm, "run": run.run, "steps": steps}


def player_page(cells: Mapping[str, Sequence[TracedRun]], title: str) -> str:
    """Return a page with a player for each cell, by the cell's name."""
    players = [(name, _player_html(runs, PAGE_BYTES)) for name, runs in cells.items()]
    page = templates(trim_blocks=True).get_template("step_player_page.html.j2")
    return str(page.render(title=title, cells=players))
