"""Published differences beside ours: a row per case, theirs and ours joined by a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.analysis.document.arm_styles import arm_classes
from labkit.analysis.document.chart import ROW_HEIGHT, Chart, padded_range
from labkit.analysis.number_format import percent_text, slug

Json = Mapping[str, Any]
PUBLISHED = "published"  # the style class of published numbers
ARM_HEIGHT = 15  # per arm, in a row with several arms
CAPTION = (
    "Differences from the baseline: published by others (hollow diamonds) and measured here, "
    "with our intervals. The machines differ, so the numbers are never mixed"
)


@dataclass(frozen=True)
class PublishedDifference:
    """A published difference in percent, and our comparison of the same row and arm, or None."""

    row: str
    arm: str
    published_pct: float
    comparison: Json | None


def published_differences(cell: Json) -> list[PublishedDifference]:
    """Return the published differences for this cell's arms and rows."""
    published = cell["published"]
    rows = published.get("rows") or [] if isinstance(published, Mapping) else []
    own = {(row["case"], row["metric"]): row for row in cell["rows"]}
    several_metrics = len({row.get("metric") for row in rows}) > 1
    styles, found = arm_classes(cell), []
    for row in rows:
        metric = row.get("metric", published.get("metric"))
        own_row = own.get((row["case"], metric))
        if own_row is None:
            continue
        comparisons = {c["arm"]: c for c in own_row["comparisons"]}
        name = f"{row['case']}: {metric}" if several_metrics else row["case"]
        found += [
            PublishedDifference(name, arm, float(percent), comparisons.get(arm))
            for arm, percent in (row.get("delta_pct") or {}).items()
            if arm in styles
        ]
    return found


def published_chart(cell: Json) -> Chart | None:
    """Return the chart, or None if no row has both a published difference and one of ours."""
    found = published_differences(cell)
    if not any(_known(one) for one in found):
        return None
    names = list(dict.fromkeys(one.row for one in found))
    arms = list(dict.fromkeys(one.arm for one in found))
    keys = ("effect_pct", "ci_low_pct", "ci_high_pct")
    known = [one.published_pct for one in found]
    known += [
        one.comparison[key]
        for one in found
        if one.comparison is not None
        for key in keys
        if one.comparison[key] is not None
    ]
    chart = Chart(
        title="published differences beside ours",
        x=padded_range([*known, 0.0]),
        y=(0.0, float(len(names))),
        x_label=f"difference from {cell['arms'][0]['name']} (%)",
        rows=tuple(names),
        row_height=max(ROW_HEIGHT, ARM_HEIGHT * len(arms) + 8),
    )
    chart.line([(0.0, 0.0), (0.0, float(len(names)))], "zero")
    step = ARM_HEIGHT / chart.row_height
    for one in found:
        middle = len(names) - names.index(one.row) - 0.5
        _draw(chart, cell, one, middle + ((len(arms) - 1) / 2 - arms.index(one.arm)) * step)
    return chart


def _known(one: PublishedDifference) -> bool:
    return one.comparison is not None and one.comparison["effect_pct"] is not None


def _draw(chart: Chart, cell: Json, one: PublishedDifference, y: float) -> None:
    style, mark = arm_classes(cell)[one.arm]
    comparison = one.comparison
    if comparison is not None and _known(one):
        ours = comparison["effect_pct"]
        chart.line([(one.published_pct, y), (ours, y)], "link", one.arm)
        if comparison["ci_low_pct"] is not None:
            ends = [(comparison[f"ci_{end}_pct"], y) for end in ("low", "high")]
            chart.line(ends, f"line {style}", one.arm)
        tip = f"{one.row}, {one.arm}, measured here: {percent_text(ours)}"
        chart.dot(ours, y, style, mark, tip, arm=one.arm)
    tip = f"{one.row}, {one.arm}, published: {percent_text(one.published_pct)}"
    chart.dot(one.published_pct, y, PUBLISHED, "diamond", tip, arm=one.arm)


def published_stem(cell: Json) -> str:
    """Return the name of the picture without the extension."""
    return f"{slug(cell['cell'])}--published"
