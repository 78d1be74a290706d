"""The section "Why": where the time of steps went, in sentences, a table and waterfalls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from labkit.analysis.charts.step_player import TracedRun, first_traced_runs
from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import (
    BulletList,
    CellSource,
    ChartPart,
    PictureFile,
    ReportPart,
    TablePart,
    section,
)
from labkit.analysis.document.table_model import Column, Table, if_known
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.step_part_times import (
    HOST,
    PART_NAMES,
    STALLS,
    ArmTime,
    PartDifference,
    PartShare,
    TimeDivision,
)
from labkit.analysis.number_format import (
    interval_text,
    magnitude_text,
    p_text,
    signed_text,
    value_text,
)
from labkit.analysis.text_format import slug
from labkit.config import count_text

TRACED_NOTE = (
    "These runs had no clocks (an earlier version), so no cause is tested: means over the stored "
    "steps of each arm's first run (µs). The trace itself takes time."
)
X_LABEL = "time per output token (µs)"
NOT_DIVIDED = "not divided"
WORK_NAMES = {
    "padding": "padding",
    "recomputation": "tokens computed again after preemptions",
    "prefix hits": "hits of the prefix cache",
}
GROUP_NAMES = {
    "attention": "attention",
    "products": "the products with weights",
    "host": "the host (scheduler, batch, plan, sampling, update)",
}
LESS_TIME_PCT = 10.0  # of a part, as an example


def time_table(cell: Cell, division: TimeDivision, arms: Sequence[ArmTime]) -> Table[str]:
    """Return the parts' times per output token: the baseline's, and the arms' differences."""
    shares = {share.part: share for share in division.baseline}
    columns = [
        Column[str]("part of a step", lambda name: PART_NAMES.get(name, name), numeric=False),
        Column(
            f"{cell.baseline} (µs)",
            lambda name: shares[name].us if name in shares else division.total_us,
            value_text,
        ),
        Column("share (%)", lambda name: shares[name].pct if name in shares else 100.0, value_text),
    ]
    columns += [column for arm in arms for column in _arm_columns(arm)]
    return Table(tuple(columns), (*shares, "total"), (clocks_text(division),))


def _arm_columns(arm: ArmTime) -> list[Column[str]]:
    parts = {one.part: one for one in (*arm.parts, arm.total)}

    def column(heading: str, text: Callable[[PartDifference], str]) -> Column[str]:
        return Column(heading, lambda name: text(parts[name]) if name in parts else "")

    return [
        column(f"{arm.arm} (µs)", lambda one: value_text(one.us)),
        column("difference (µs)", lambda one: if_known(signed_text)(one.difference_us)),
        column("interval", lambda one: interval_text(one.low_us, one.high_us)),
        column("adjusted p", lambda one: p_text(one.p_adjusted)),
    ]


@section("Why: where the time went")
def time_section(report: CellSource) -> Iterator[ReportPart]:
    """Show the first cause of each arm, the parts' times, and a waterfall for each arm.

    Of runs without clocks that stored their steps: the mean times of those.
    """
    cell, division = report.cell, report.cell.time
    if division is None:
        if runs := first_traced_runs(report):
            yield TablePart(traced_time_table(runs))
        return
    arms = [arm for arm in division.arms if arm.arm in cell.compared_arms]
    yield BulletList(list(_time_sentences(cell, division, arms)))
    yield TablePart(time_table(cell, division, arms))
    for arm in arms:
        caption = f"From {cell.baseline}'s time per output token to {arm.arm}'s"
        yield (part := ChartPart(waterfall_chart(cell.baseline, division, arm), caption))
        stem = cell.stem(f"why-{slug(arm.arm)}")
        yield PictureFile(stem, f"Where {arm.arm}'s time went", [part])


def traced_time_table(runs: Sequence[TracedRun]) -> Table[TracedRun]:
    """Return the mean times of the parts of the steps that runs stored, a line per run."""
    means = {run.run: mean_times(run.trace["steps"]) for run in runs}

    def column(name: str, heading: str) -> Column[TracedRun]:
        return Column(heading, lambda run: value_text(means[run.run].get(name)))

    return Table(
        (
            Column[TracedRun]("arm", lambda run: run.arm, numeric=False),
            *(column(name, PART_NAMES[name]) for name in (*HOST, "model")),
            column("step", "whole step"),
        ),
        tuple(runs),
        (TRACED_NOTE,),
    )


def mean_times(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean time of each part of stored steps, and of the whole ``step`` (us).

    In a trace, ``draft`` is within ``schedule``, and ``plan`` may be within the forward.
    """
    spans = [step["times_us"] for step in steps if "forward" in step["times_us"]]
    if not spans:
        return {}
    parts = []
    for times in spans:
        own = {name: times.get(name, (0, 0))[1] for name in (*HOST, "forward")}
        begin, model = times["forward"]
        within = begin <= times.get("plan", (-1, 0))[0] < begin + model
        own["schedule"] -= own["draft"]
        own["model"] = model - (own["plan"] if within else 0)
        ends = [start + duration for start, duration in times.values()]
        own["step"] = max(ends) - min(start for start, _ in times.values())
        parts.append(own)
    return {name: fmean(own[name] for own in parts) for name in parts[0]}


def _waterfall_steps(division: TimeDivision, arm: ArmTime) -> list[tuple[str, float]]:
    """Return the differences that lead from the baseline to the arm, in us, in order of a step.

    The parts' differences are estimated one by one and need not add up to that of the whole. What
    is left over is the last step, ``NOT_DIVIDED``.
    """
    parts = (one for one in arm.parts if one.part != STALLS)
    steps = [(PART_NAMES[one.part], one.difference_us or 0.0) for one in parts]
    rest = (arm.total.difference_us or 0.0) - sum(us for _, us in steps)
    return [*((name, us) for name, us in steps if us), (NOT_DIVIDED, rest)]


def waterfall_chart(baseline: str, division: TimeDivision, arm: ArmTime) -> Chart:
    """Return the chart: a bar for the baseline, one for each difference, and one for the arm."""
    steps, level = _waterfall_steps(division, arm), division.total_us
    levels = list(accumulate((us for _, us in steps), initial=level))
    span = (max(levels) - min(levels)) or level * 0.01
    low = max(0.0, min(levels) - span)
    rows = (baseline, *(name for name, _ in steps), arm.arm)
    chart = Chart(
        f"from {baseline} to {arm.arm}", (low, max(levels) + 0.6 * span), (0.0, float(len(rows))),
        X_LABEL, rows=rows,
    )  # fmt: skip

    bars = [(low, level), *pairwise(levels), (low, levels[-1])]
    changes = [signed_text(us, 1 if abs(us) >= 10 else 2) for _, us in steps]
    texts = [value_text(level), *changes, value_text(levels[-1])]
    for index, (name, ends, text) in enumerate(zip(rows, bars, texts, strict=True)):
        y, style = len(rows) - index, "used" if 0 < index < len(rows) - 1 else "reserved"
        chart.bar((min(ends), max(ends)), (y - 0.8, y - 0.2), style, f"{name}: {text}")
        chart.text(max(ends), y - 0.5, text, dx=6)
    return chart


def _cause_text(arm: ArmTime) -> str:
    """Name the first cause of an arm's difference, or say why there is none."""
    total, first = arm.total, arm.cause_part
    whole = ""
    if total.pct is not None:
        more = "more" if total.pct >= 0 else "less"
        whole = f"{magnitude_text(total.pct)} % {more} time per output token; "
    if first is None or arm.cause is None:
        return f"{arm.arm}: {whole}{_why_none(arm)}."
    interval = interval_text(first.low_us, first.high_us)
    by = WORK_NAMES.get(arm.cause)
    through = f" (it shows in {PART_NAMES[first.part]})" if by else ""
    return (
        f"{arm.arm}: {whole}first cause: {by or PART_NAMES[first.part]}{through}, "
        f"{signed_text(first.difference_us or 0.0)} µs per output token ({interval}), "
        f"{signed_text(first.pct or 0.0)} % of the baseline's time."
    )


def _why_none(arm: ArmTime) -> str:
    if all(part.low_us is None for part in arm.parts):
        return "too few blocks to name a cause"
    if arm.cause_part is None:
        return "no part's time differs significantly in its direction"
    return "no metric's difference is decided, so there is no cause to name"


def worth_text(share: PartShare) -> str:
    """Say how much a change of a part can bring at most: the part's share of the time."""
    most = 100 * share.pct / (100 - share.pct) if share.pct < 100 else math.inf
    some = LESS_TIME_PCT / 100 * share.pct
    within = ""
    if share.low_pct is not None and share.high_pct is not None:
        within = f" ({magnitude_text(share.low_pct)} to {magnitude_text(share.high_pct)})"
    return (
        f"{magnitude_text(share.pct)} %{within} of the time goes to {GROUP_NAMES[share.part]}: "
        f"without it, throughput would be at most {magnitude_text(most)} % higher; "
        f"in {LESS_TIME_PCT:g} % less time, {magnitude_text(100 * some / (100 - some))} %"
    )


def _predicted_text(cell: Cell, arm: ArmTime) -> str | None:
    """Put the throughput that an arm's parts predict beside the measured one; None without one."""
    compared = (row.comparison(arm.arm) for row in cell.primary_rows if row.unit == "tok/s")
    measured = next(filter(None, compared), None)
    if measured is None or measured.effect_pct is None or arm.total.pct is None:
        return None
    predicted = 100 * (1 / (1 + arm.total.pct / 100) - 1)
    interval = f" ({interval_text(*measured.ci_pct)})" if measured.ci_pct else ""
    return (
        f"{arm.arm}: its parts predict {signed_text(predicted)} % tok/s; measured "
        f"{signed_text(measured.effect_pct)} %{interval}"
    )


def _time_sentences(cell: Cell, division: TimeDivision, arms: Sequence[ArmTime]) -> Iterator[str]:
    for arm in arms:
        yield _cause_text(arm)
        if arm.counts:
            yield f"{arm.arm}, counted: {'; '.join(arm.counts)}."
        if predicted := _predicted_text(cell, arm):
            yield f"{predicted}."
    yield f"What it can be worth: {'; '.join(map(worth_text, division.groups))}."


def clocks_text(division: TimeDivision) -> str:
    """Say where the times come from and what the clocks cost."""
    return (
        f"Times are from {count_text(division.tokens, 'output token')} of turns with clocks after "
        f"the measurement ({division.of_tokens_pct:.0f} % of its tokens), which decide nothing; "
        f"the clocks add {value_text(division.clocks_pct)} % to a step. Stalls, what single "
        "steps took beyond the median of their part, are not in the total. Intervals and p: the "
        "permutation test of the metrics, adjusted over parts and arms. Published, of LocalAI's "
        "llama.cpp fork: the host takes 4 to 8 % of a step (inputs 47 µs, block table 2 µs)."
    )
