"""Memory over time, the phases of requests, and each arm's peak KV memory.

Times are of one run per arm: for every arm except the control, the first successful run with a
timeline, in seconds from the first submission. The peak is the reserved KV memory, and the part of
it that held tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    Parts,
    PictureFile,
    ReportPart,
    section,
)
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import value_text
from labkit.analysis.text_format import slug
from labkit.records import Record
from labkit.records.record_notes_schema import RequestNote

# Label and style class of each series in a record's timeline. Series that stay 0 are not shown.
# Related series share a colour and differ in their dashes.
SERIES = {
    "rss_bytes": ("process, resident", "line series0"),
    "swap_bytes": ("process, in swap", "line series0 dashed"),
    "compressed_bytes": ("compressed, all programs", "line series4"),
    "kv_reserved_bytes": ("KV reserved", "line series1 dashed"),
    "kv_used_bytes": ("KV used", "line series1"),
    "mlx_active_bytes": ("MLX active", "line series2"),
    "mlx_cache_bytes": ("MLX cache", "line series2 dashed"),
    "mlx_peak_bytes": ("MLX peak", "line series3 dashed"),
}
PHASES = ("waiting", "prefill", "decode")
X_LABEL = "seconds from the first submission"
MAX_SHOWN_REQUESTS = 400  # evenly chosen from all, in the order of submission
PEAK_CAPTION = (
    "Peak KV memory: the part that held tokens (solid) and the rest of the reserved part (pale)"
)


@dataclass(frozen=True)
class RequestTimes:
    """The times (seconds) of a request's submission, admission, first token and end.

    ``admitted_s`` is None if the engine does not report admissions. Waiting then counts as prefill.
    """

    request: str
    submitted_s: float
    admitted_s: float | None
    first_token_s: float
    finished_s: float

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Yield each phase's name, start and end."""
        start_s = self.submitted_s
        if self.admitted_s is not None:
            yield "waiting", start_s, self.admitted_s
            start_s = self.admitted_s
        yield "prefill", start_s, self.first_token_s
        yield "decode", self.first_token_s, self.finished_s


@dataclass(frozen=True)
class RunTimeline:
    """A run's memory at times ``t_s`` (MiB, by series) and its requests.

    ``requests`` may be only a sample of the run's ``num_requests`` requests.
    """

    arm: str
    run: str
    t_s: tuple[float, ...]
    memory_mib: Mapping[str, tuple[float, ...]]
    requests: tuple[RequestTimes, ...]
    num_requests: int

    @property
    def waiting_known(self) -> bool:
        """Whether the engine reports when it admits requests."""
        return all(request.admitted_s is not None for request in self.requests)

    @property
    def end_s(self) -> float:
        return max([*self.t_s, *(request.finished_s for request in self.requests)])

    def caption(self, what: str = "memory, and below it each request's phases") -> str:
        """Return a caption with notes on missing phases or requests."""
        text = f"{self.arm}, run {self.run}: {what}"
        if not self.waiting_known:
            text += " (prefill includes waiting: this engine does not report admissions)"
        if len(self.requests) < self.num_requests:
            text += f"; {len(self.requests)} of {self.num_requests:,} requests, evenly chosen"
        return text


def _run_timelines(records: Sequence[Record], arms: Sequence[str]) -> list[RunTimeline]:
    """Return the first timeline of each arm in ``arms``; arms without a timeline are left out."""
    runs = ((r for r in records if r.ok and r.arm == arm) for arm in arms)
    firsts = (next(filter(None, map(_run_timeline, own)), None) for own in runs)
    return list(filter(None, firsts))


def _run_timeline(record: Record) -> RunTimeline | None:
    series = record.known_notes.get("timeline") or {}
    requests = next(
        (c.known_notes["requests"] for c in record.cases if c.known_notes.get("requests")), ()
    )
    if not series.get("t_s") or not requests:
        return None
    memory = {
        name: tuple(float(x or 0) / 2**20 for x in series[name])
        for name in SERIES
        if any(series.get(name) or ())
    }
    count, step = len(requests), max(1.0, len(requests) / MAX_SHOWN_REQUESTS)
    chosen = [requests[int(i * step)] for i in range(min(MAX_SHOWN_REQUESTS, count))]
    times, t_s = tuple(map(_request_times, chosen)), tuple(map(float, series["t_s"]))
    return RunTimeline(record.arm, record.run, t_s, memory, times, count)


def _request_times(request: RequestNote) -> RequestTimes:
    submitted_s, admitted_ms = request["submitted_ms"] / 1e3, request.get("admitted_ms")
    latency_from_s = request.get("arrived_ms", request["submitted_ms"]) / 1e3
    return RequestTimes(
        str(request["id"]),
        submitted_s,
        None if admitted_ms is None else admitted_ms / 1e3,
        latency_from_s + request["ttft_ms"] / 1e3,
        latency_from_s + request["e2e_ms"] / 1e3,
    )


def _memory_part(timeline: RunTimeline, end_s: float) -> ChartPart:
    top = max((max(values) for values in timeline.memory_mib.values()), default=1.0)
    chart = Chart(
        "memory over time", (0.0, end_s), (0.0, 1.05 * top), X_LABEL, "memory (MiB)",
        height=250, x_unit="s", unit="bytes", link="time",
    )  # fmt: skip
    for name, values in timeline.memory_mib.items():
        label, style = SERIES[name]
        chart.line(list(zip(timeline.t_s, values, strict=True)), style, label)
    keys = tuple((*SERIES[name], "line") for name in timeline.memory_mib)
    return ChartPart(chart, f"{timeline.arm}, run {timeline.run}", keys, timeline.arm)


def _requests_part(timeline: RunTimeline, end_s: float) -> ChartPart:
    """Return the chart of a run's requests, one below the other, whose time axis zooms.

    ``end_s``: end of the time axis, the same for all arms, so that they can be compared.
    """
    count = len(timeline.requests)
    chart = Chart(
        "phases of the requests", (0.0, end_s), (0.0, float(count)), X_LABEL, "request",
        height=70 + min(320, max(60, 9 * count)), y_ticks=False, x_unit="s", link="time",
        zooms=True,
    )  # fmt: skip
    phases = PHASES if timeline.waiting_known else PHASES[1:]
    for phase in phases:
        for index, request in enumerate(timeline.requests):
            extent = (count - index - 0.9, count - index - 0.1)
            for name, start, end in request.phases():
                if name == phase:
                    chart.bar((start, end), extent, phase, request.request)
    keys = tuple((name, f"bar {name}", "bar") for name in phases)
    caption = timeline.caption("each request's phases, in the order of submission")
    return ChartPart(chart, caption, keys, timeline.arm)


@section("Memory over time")
def memory_timeline_section(report: CellSource) -> Iterator[ReportPart]:
    """Show one run's memory for each arm. In Markdown, the phases of its requests are below it."""
    timelines = _run_timelines(report.records, report.cell.real_arms)
    end_s = max((each.end_s for each in timelines), default=0.0)
    for timeline in timelines:
        memory, requests = _memory_part(timeline, end_s), _requests_part(timeline, end_s)
        stem = report.cell.stem(f"memory--{slug(timeline.arm)}")
        yield memory
        yield PictureFile(stem, timeline.caption(), [memory, requests], captioned=True)


@section("Requests over time")
def request_timeline_section(report: CellSource) -> Iterator[ReportPart]:
    """Show, for one run of each arm, when each request waited, was prefilled and was decoded."""
    timelines = _run_timelines(report.records, report.cell.real_arms)
    for timeline in timelines:
        yield _requests_part(timeline, max(each.end_s for each in timelines))


def _peak_kv_mib(cell: Cell) -> dict[str, tuple[float, float]]:
    """Return each arm's peak KV memory, reserved and of it used (MiB, medians over its runs).

    Arms that did not count it are left out. Empty if all arms have the same.
    """
    peaks = {
        arm: (reserved / 2**20, min(used, reserved) / 2**20)
        for arm in cell.real_arms
        if (reserved := cell.counters[arm].get("peak_kv_bytes"))
        and (used := cell.counters[arm].get("kv_used_bytes"))
    }
    return peaks if len(set(peaks.values())) > 1 else {}


@section("KV memory reserved and used")
def kv_utilization_section(report: CellSource) -> Parts:
    """Show how much of the reserved KV memory held tokens."""
    peaks = _peak_kv_mib(report.cell)
    if not peaks:
        return []
    largest, count = max(reserved for reserved, _ in peaks.values()), len(peaks)
    chart = Chart(
        "KV memory reserved and used", (0.0, 1.9 * largest), (0.0, float(count)), "KV memory (MiB)",
        rows=tuple(peaks), row_height=26,
    )  # fmt: skip
    for index, (arm, (reserved, used)) in enumerate(peaks.items()):
        sizes = f"{value_text(used)} of {value_text(reserved)} MiB"
        label = f"{sizes}, {100 * (1 - used / reserved):.1f} % wasted"
        extent = (count - index - 0.85, count - index - 0.15)
        chart.bar((0.0, reserved), extent, "reserved", label, arm)
        chart.bar((0.0, used), extent, "used", label, arm)
        chart.text(reserved, count - index - 0.5, label, dx=8)
    part = ChartPart(chart, PEAK_CAPTION)
    return [part, PictureFile(report.cell.stem("kv-held"), PEAK_CAPTION, [part])]
