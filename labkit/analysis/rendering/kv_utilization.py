"""What KV memory each arm held at most, and how much of that held tokens: a bar for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import slug, value_text
from labkit.analysis.rendering.arm_styles import COLOURS
from labkit.analysis.rendering.svg_elements import Chart
from labkit.analysis.verdict_sentences import real_arms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
X_LABEL = "KV memory (MiB)"
CAPTION = "KV memory at its most: what held tokens (full), and what was held for nothing (pale)"


@dataclass(frozen=True)
class Held:
    """An arm's KV memory at its most, and the most that held tokens (MiB, medians of its runs)."""

    arm: str
    held: float
    used: float

    @property
    def said(self) -> str:
        """Its numbers: ``1.50 of 4.00 MiB, 62.5 % wasted``."""
        waste = 100 * (1 - self.used / self.held)
        return f"{value_text(self.used)} of {value_text(self.held)} MiB, {waste:.1f} % wasted"


def held(cell: Json) -> list[Held]:
    """Return the arms that count both; nothing where all hold and use the same."""
    counted = {arm["name"]: arm["counters"] for arm in cell["arms"]}
    found = [
        Held(arm, most / 2**20, min(used, most) / 2**20)
        for arm in real_arms(cell)
        if (most := counted[arm].get("peak_kv_bytes"))
        and (used := counted[arm].get("kv_used_bytes"))
    ]
    return found if len({(one.held, one.used) for one in found}) > 1 else []


def held_chart(found: Sequence[Held]) -> str:
    """Draw the bars for the page."""
    top, count = max(one.held for one in found), len(found)
    chart = Chart(
        "KV memory held and used", (0.0, 1.5 * top), (0.0, float(count)), X_LABEL,
        height=62 + 26 * count, left=150,
    )  # fmt: skip
    chart.axes(y_ticks=False)
    for index, one in enumerate(found):
        place = (count - index - 0.85, count - index - 0.15)
        chart.bar((0.0, one.held), place, "held", one.said)
        chart.bar((0.0, one.used), place, "used", one.said)
        middle = chart.py(count - index - 0.5)
        chart.text(chart.left - 8, middle, one.arm)
        chart.text(chart.px(one.held) + 8, middle, one.said, "start")
    return chart.svg()


def held_figure(found: Sequence[Held]) -> Figure:
    """Draw the same as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 0.8 + 0.4 * len(found)), layout="constrained")
    axes = figure.subplots()
    names = [one.arm for one in found]
    axes.barh(names, [one.held for one in found], 0.7, color=COLOURS[0], alpha=0.25)
    axes.barh(names, [one.used for one in found], 0.7, color=COLOURS[0])
    for index, one in enumerate(found):
        axes.annotate(one.said, (one.held, index), (5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.6 * max(one.held for one in found))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(X_LABEL)
    return figure


def held_stem(cell: Json) -> str:
    """Name the picture's files, without their endings."""
    return f"{slug(cell['cell'])}--kv-held"
