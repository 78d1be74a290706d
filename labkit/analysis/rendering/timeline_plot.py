"""Memory lines above, the requests' phases under them: for the page, and as PNG and SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.analysis.rendering.figures import COLOURS
from labkit.analysis.rendering.svg import Chart
from labkit.analysis.rendering.timeline import PHASES, SERIES, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

X_LABEL = "seconds from the first submission"
# What belongs together has one colour and differs in its dashes: (colour's number, dashed).
LINES = {
    "rss_bytes": (0, False),
    "swap_bytes": (0, True),
    "kv_reserved_bytes": (1, True),
    "kv_used_bytes": (1, False),
    "mlx_active_bytes": (2, False),
    "mlx_cache_bytes": (2, True),
    "mlx_peak_bytes": (3, True),
}
PHASE_COLOURS = {"waiting": "#c9ced4", "prefill": COLOURS[5], "decode": COLOURS[4]}


def line_style(name: str) -> str:
    """Give the style class of a series on the page."""
    number, dashed = LINES[name]
    return f"line arm{number}{' dashed' if dashed else ''}"


def timeline_charts(timeline: Timeline) -> tuple[str, str]:
    """Draw a timeline for the page: memory, and the requests' phases on the same time axis."""
    x = (0.0, timeline.end)
    top = max((max(values) for values in timeline.memory.values()), default=1.0)
    memory = Chart("memory over time", x, (0.0, 1.05 * top), "", "memory (MiB)", height=230)
    memory.axes()
    for name, values in timeline.memory.items():
        memory.line(list(zip(timeline.t_s, values, strict=True)), line_style(name))
    count = len(timeline.bars)
    phases = Chart(
        "phases of the requests", x, (0.0, float(count)), X_LABEL, "request",
        height=70 + min(240, 9 * count),
    )  # fmt: skip
    phases.axes(y_ticks=False)
    for index, bar in enumerate(timeline.bars):
        for phase, start, end in bar.phases():
            phases.bar((start, end), (count - index - 0.9, count - index - 0.1), phase, bar.request)
    return memory.svg(), phases.svg()


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw a timeline with matplotlib, as the page shows it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    memory, phases = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, values in timeline.memory.items():
        number, dashed = LINES[name]
        style = "--" if dashed else "-"
        memory.plot(timeline.t_s, values, style, color=COLOURS[number], label=SERIES[name])
    memory.set_ylabel("memory (MiB)")
    memory.set_ylim(bottom=0)
    memory.set_title(f"{timeline.arm}, run {timeline.run}", fontsize=10)
    memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    count = len(timeline.bars)
    for phase in PHASES:
        spans = [
            (index, start, end - start)
            for index, bar in enumerate(timeline.bars)
            for name, start, end in bar.phases()
            if name == phase
        ]
        where, starts, widths = zip(*spans, strict=True) if spans else ((), (), ())
        phases.barh(where, widths, 0.8, starts, color=PHASE_COLOURS[phase])
    phases.set_ylim(count - 0.5, -0.5)
    phases.set_yticks([])
    phases.set_ylabel("request")
    phases.set_xlabel(X_LABEL)
    keys = [Patch(color=PHASE_COLOURS[name], label=name) for name in timeline.phases]
    phases.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
