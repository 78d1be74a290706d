"""The quality of a scoring workload's arms: against speed, in numbers, and where it is worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.analysis.charts.latency_throughput_chart import frontier
from labkit.analysis.comparison.perplexity_and_kl import KL_QUANTILES, scoring_note
from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    Parts,
    PictureFile,
    section,
    table_parts,
)
from labkit.analysis.document.svg_chart_renderer import add_point_labels, arm_classes
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.output_quality_sentences import interval_text, share_text
from labkit.analysis.model.cell_model import ArmQuality, Cell
from labkit.analysis.number_format import percent_text, significant_text
from labkit.analysis.statistics.text_window_intervals import (
    CONFIDENCE,
    MIN_BEYOND,
    MIN_WINDOWS,
    Interval,
)
from labkit.config import count_text
from labkit.records import Record

Place = tuple[str, Mapping[str, Any]]
MAX_PLACES = 5  # per arm
SPEED = "total_tok_s"
SPEED_QUALITY_CAPTION = (
    "Speed against quality, with both intervals. The line is the frontier: no other arm is "
    "estimated to be both faster and closer to the baseline than an arm on the line"
)


def _quality_table(cell: Cell, records: Sequence[Record]) -> Table[ArmQuality] | None:
    """Return every arm's quality with its intervals, or None if the workload scores no texts."""
    qualities = _real_qualities(cell)
    if not qualities:
        return None
    columns = [
        Column[ArmQuality]("arm", lambda quality: quality.arm, numeric=False),
        _column("perplexity", "perplexity"),
        _column("ratio", "perplexity_ratio", 5),
        _column("KL mean (nats)", "kl_mean"),
        *(_column(f"KL {100 * share:g} %", name) for name, share in KL_QUANTILES.items()),
        _share_column("same next token", "top1_agreement"),
        _column("RMS change of p", "probability_change"),
    ]
    arms = [quality.arm for quality in qualities]
    notes = _scoring_notes(arms, records, cell.design.quality_confidence)
    if any(quality.metrics[name].low is None for quality in qualities for name in KL_QUANTILES):
        notes += (
            f"Fewer than {MIN_WINDOWS} windows have no interval, nor has a quantile with fewer "
            f"than {MIN_BEYOND} positions beyond it.",
        )
    return Table(tuple(columns), tuple(qualities), notes)


def _scoring_notes(
    arms: Sequence[str], records: Sequence[Record], confidence: float = CONFIDENCE
) -> tuple[str, ...]:
    """Return the sentences below the table. The first arm is the baseline."""
    by_arm = {arm: note for arm in arms if (note := scoring_note(arm, records)) is not None}
    baseline, *others = arms
    notes = by_arm[baseline]
    windows = notes["windows"]
    fewer = [arm for arm in others if by_arm[arm]["reference_top"] < notes["reference_top"]]
    return (
        f"{count_text(len(windows), 'window')}, "
        f"{count_text(sum(w['tokens'] for w in windows), 'predicted token')}; "
        f"{100 * confidence:.3g} % "
        "intervals over windows (block jackknife; of quantiles, Woodruff's). Compared with the arm "
        f"{baseline}.",
        "KL divergence is a lower bound. It compares the baseline's "
        f"{notes['reference_top']:,} likeliest tokens one by one, and all other tokens "
        f"({notes['reference_rest']:.2%} of the probability on average) as one.",
        *(
            f"The server of arm {arm} returns its {by_arm[arm]['reference_top']} likeliest tokens "
            "only: its KL divergence compares these one by one."
            for arm in fewer
        ),
    )


def _share_column(heading: str, name: str) -> Column[ArmQuality]:
    return Column(heading, lambda one: share_text(one.metrics[name]), numeric=False)


def _column(heading: str, name: str, digits: int = 3) -> Column[ArmQuality]:
    return Column(heading, lambda one: interval_text(one.metrics[name], digits), numeric=False)


def _worst_places_table(cell: Cell, records: Sequence[Record]) -> Table[Place]:
    """Return the text positions where each arm is furthest from the baseline."""
    places = [
        (arm, place)
        for arm in cell.real_arms
        if (note := scoring_note(arm, records)) is not None
        for place in note["worst"][:MAX_PLACES]
    ]

    def where(place: Place) -> str:
        return f"{place[1]['window']} + {place[1]['position']}"

    columns = (
        Column[Place]("arm", lambda place: place[0], numeric=False),
        Column[Place]("KL (nats)", lambda place: significant_text(place[1]["kl"], 3)),
        _text_column("before", "before"),
        _text_column("token", "token"),
        _text_column("after", "after"),
        _text_column("baseline predicts", "baseline_top1"),
        _text_column("arm predicts", "arm_top1"),
        Column[Place]("where", where, numeric=False),
    )
    return Table(columns, tuple(places))


def _text_column(heading: str, key: str) -> Column[Place]:
    def text(place: Place) -> str:  # in one line, with its line breaks escaped
        return repr(place[1][key])[1:-1].replace("|", "¦")

    return Column(heading, text, numeric=False, verbatim=True)


def _real_qualities(cell: Cell) -> list[ArmQuality]:
    return [quality for quality in cell.quality or () if quality.arm in cell.real_arms]


def speed_quality_chart(cell: Cell) -> Chart | None:
    """Return the mean KL divergence in nats over the speed compared with the baseline in percent.

    None if no arm besides the baseline has a known speed and quality.
    """
    speeds = {
        one.arm: Interval(one.effect_pct, one.ci_low_pct, one.ci_high_pct)
        for row in cell.rows
        if row.metric == SPEED
        for one in row.comparisons
        if one.effect_pct is not None
    }
    speeds[cell.baseline] = Interval(0.0, 0.0, 0.0)
    qualities = {one.arm: one.metrics["kl_mean"] for one in _real_qualities(cell)}
    points = [(arm, speeds[arm], kl) for arm, kl in qualities.items() if arm in speeds]
    if len(points) < 2:
        return None
    chart = Chart(
        title="speed against quality",
        x=padded_range([end for _, speed, _ in points for end in _known(speed)]),
        y=padded_range([end for *_, kl in points for end in _known(kl)]),
        x_label=f"speed compared with {points[0][0]} (%)",
        y_label="KL divergence, mean (nats)",
        height=300,
    )
    best = frontier(points, lambda point: point[2].estimate, lambda point: point[1].estimate)
    chart.line([(speed.estimate, kl.estimate) for _, speed, kl in best], "zero")
    styles, on = arm_classes(cell), {arm for arm, *_ in best}
    for arm, speed, kl in points:
        style, mark = styles[arm]
        x, y = speed.estimate, kl.estimate
        chart.line([(end, y) for end in _known(speed)], f"line {style}", arm)
        chart.line([(x, end) for end in _known(kl)], f"line {style}", arm)
        where = ", on the frontier" if arm in on else ""
        tip = f"{arm}: {percent_text(x)}, KL {interval_text(kl)} nats{where}"
        chart.dot(x, y, style, mark, tip, arm=arm)
    add_point_labels(chart, [(speed.estimate, kl.estimate, arm) for arm, speed, kl in points])
    return chart


def _known(interval: Interval) -> list[float]:
    """Return both limits of an interval, or the estimate alone if the interval is unbounded."""
    if interval.low is None or interval.high is None:
        return [interval.estimate]
    return [interval.low, interval.high]


@section("Quality")
def quality_section(report: CellSource) -> Parts:
    """Show speed against quality, every arm's quality in numbers, and the worst positions."""
    cell, records = report.cell, report.records
    if not cell.quality:
        return []
    chart = speed_quality_chart(cell)
    picture: Parts = []
    if chart is not None:
        part = ChartPart(chart, SPEED_QUALITY_CAPTION)
        picture = [part, PictureFile(cell.stem("speed-quality"), SPEED_QUALITY_CAPTION, [part])]
    return [
        *picture,
        *table_parts(_quality_table(cell, records), _worst_places_table(cell, records)),
    ]
