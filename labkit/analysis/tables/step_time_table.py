"""The host's time in a step by part, from the steps that a run stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from labkit.analysis.charts.step_player import TracedRun, traced_records, traced_run
from labkit.analysis.document.report_parts import CellSource, Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.number_format import value_text
from labkit.records import Record

# Heading by part. ``draft`` lies within ``schedule``, and ``plan`` within ``forward``.
HOST_PARTS = {
    "schedule": "schedule",
    "draft": "of it drafts",
    "build": "inputs",
    "plan": "tables and maps",
    "sample": "sample",
    "update": "update",
}
NOTE = (
    "Means over the stored steps of each arm's first run (µs). Inputs: packed arrays and padding "
    "rows. Tables and maps: block tables and what attention needs for the step. Model: the forward "
    "without them. Host: the share of the step outside the model. LocalAI's llama.cpp fork has for "
    "its own buckets: set_inputs 47 µs, block table 2 µs, and all host work 4 to 8 % of a step."
)


def mean_times(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean time of each part (us), of ``model``, and of the whole ``step``."""
    spans = [step["times_us"] for step in steps if "forward" in step["times_us"]]
    if not spans:
        return {}
    means = {
        part: fmean(times.get(part, (0, 0))[1] for times in spans)
        for part in (*HOST_PARTS, "forward")
    }
    means["model"] = fmean(times["forward"][1] - _plan_within(times) for times in spans)
    means["step"] = fmean(
        max(start + duration for start, duration in times.values())
        - min(start for start, _ in times.values())
        for times in spans
    )
    return means


def _plan_within(times: Mapping[str, Sequence[float]]) -> float:
    """Return the time of ``plan`` if it lies within ``forward``, else 0."""
    (start, duration), (plan, plan_duration) = times["forward"], times.get("plan", (0, 0))
    return plan_duration if start <= plan < start + duration else 0.0


def step_time_table(runs: Sequence[TracedRun]) -> Table[TracedRun]:
    """Return the table, a line per run."""
    means = {run.run: mean_times(run.trace["steps"]) for run in runs}

    def time(part: str) -> Callable[[TracedRun], str]:
        return lambda run: value_text(means[run.run].get(part))

    def share(run: TracedRun) -> str:
        times = means[run.run]
        return f"{1 - times['model'] / times['step']:.0%}" if times.get("step") else ""

    return Table(
        (
            Column[TracedRun]("arm", lambda run: run.arm, numeric=False),
            *(Column(heading, time(part)) for part, heading in HOST_PARTS.items()),
            Column("model", time("model")),
            Column("step", time("step")),
            Column("host", share),
        ),
        tuple(runs),
        (NOTE,),
    )


@section("A step's time by part")
def step_time_section(report: CellSource) -> Parts:
    """Show where the time of a step goes in the first traced run of each arm."""
    first: dict[str, Record] = {}
    for record in traced_records(report.records, report.cell.real_arms):
        first.setdefault(record.arm, record)
    runs = [traced_run(record, report.analysis.data.dir) for record in first.values()]
    return table_parts(step_time_table(runs)) if runs else []
