"""One run's memory over time and its requests' phases, read from the record.

Of every arm but the control the first good run that noted them; times are seconds from
the first submission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import slug
from labkit.analysis.rendering.arm_styles import COLOURS
from labkit.analysis.rendering.svg_elements import SvgChart
from labkit.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Column of the record's timeline -> what readers call it; those that stay 0 are not shown.
SERIES = {
    "rss_bytes": "process, resident",
    "swap_bytes": "process, in swap",
    "kv_reserved_bytes": "KV reserved",
    "kv_used_bytes": "KV used",
    "mlx_active_bytes": "MLX active",
    "mlx_cache_bytes": "MLX cache",
    "mlx_peak_bytes": "MLX peak",
}
PHASES = ("waiting", "prefill", "decode")
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
MOST_BARS = 200  # requests drawn, in the order of submission


@dataclass(frozen=True)
class Bar:
    """A request's phases: seconds at which it was submitted, admitted, answered, done.

    ``admitted`` is None where the engine does not tell; waiting and prefill are one then.
    """

    request: str
    submitted: float
    admitted: float | None
    first: float
    end: float

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Yield each phase's name, beginning and end."""
        if self.admitted is not None:
            yield "waiting", self.submitted, self.admitted
        begun = self.submitted if self.admitted is None else self.admitted
        yield "prefill", begun, self.first
        yield "decode", self.first, self.end


@dataclass(frozen=True)
class Timeline:
    """A run's memory (MiB by column) at ``t_s``, and its requests."""

    arm: str
    run: str
    t_s: tuple[float, ...]
    memory: Mapping[str, tuple[float, ...]]
    bars: tuple[Bar, ...]

    @property
    def waiting_known(self) -> bool:
        """Whether the engine told when it admitted a request."""
        return all(bar.admitted is not None for bar in self.bars)

    @property
    def end(self) -> float:
        """Return the last moment there is anything to show of."""
        return max([*self.t_s, *(bar.end for bar in self.bars)])

    @property
    def phases(self) -> tuple[str, ...]:
        """Name the phases that can be told apart."""
        return PHASES if self.waiting_known else PHASES[1:]

    def caption(self) -> str:
        """Say which run this is and what is not in it."""
        text = f"{self.arm}, run {self.run}: memory, and below it each request's phases"
        if not self.waiting_known:
            text += " (prefill includes waiting: this engine does not tell them apart)"
        if len(self.bars) == MOST_BARS:
            text += f"; the first {MOST_BARS} requests"
        return text


def timelines(records: Sequence[Record], arms: Sequence[str]) -> list[Timeline]:
    """Return the first timeline of each of ``arms`` that has one."""
    found: dict[str, Timeline] = {}
    for record in records:
        if record.ok and record.arm in arms and record.arm not in found:
            timeline = _timeline(record)
            if timeline is not None:
                found[record.arm] = timeline
    return [found[arm] for arm in arms if arm in found]


def _timeline(record: Record) -> Timeline | None:
    noted = record.notes.get("timeline") or {}
    requests = next((c.notes["requests"] for c in record.cases if c.notes.get("requests")), ())
    if not noted.get("t_s") or not requests:
        return None
    memory = {
        name: tuple(float(x or 0) / 2**20 for x in noted[name])
        for name in SERIES
        if any(noted.get(name) or ())
    }
    bars = tuple(map(_bar, requests[:MOST_BARS]))
    return Timeline(record.arm, record.run, tuple(map(float, noted["t_s"])), memory, bars)


def _bar(request: Mapping[str, Any]) -> Bar:
    submitted, admitted = request["submitted_ms"] / 1e3, request.get("admitted_ms")
    return Bar(
        str(request["id"]),
        submitted,
        None if admitted is None else admitted / 1e3,
        submitted + request["ttft_ms"] / 1e3,
        submitted + request["e2e_ms"] / 1e3,
    )


def line_style(name: str) -> str:
    """Return the style class of a series on the page."""
    number, dashed = LINES[name]
    return f"line arm{number}{' dashed' if dashed else ''}"


def timeline_charts(timeline: Timeline) -> tuple[str, str]:
    """Draw a timeline for the page: memory, and the requests' phases on the same time axis."""
    x = (0.0, timeline.end)
    top = max((max(values) for values in timeline.memory.values()), default=1.0)
    memory = SvgChart("memory over time", x, (0.0, 1.05 * top), "", "memory (MiB)", height=230)
    memory.axes()
    for name, values in timeline.memory.items():
        memory.line(list(zip(timeline.t_s, values, strict=True)), line_style(name))
    count = len(timeline.bars)
    phases = SvgChart(
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


def timeline_stem(cell: Mapping[str, Any], arm: str) -> str:
    """Name the files of an arm's timeline, without their endings."""
    return f"{slug(cell['cell'])}--memory--{slug(arm)}"
