"""The roofline: how close kernels come to the machine's bandwidth and peak FLOP rate.

S. Williams, A. Waterman, D. Patterson, "Roofline" (2009): work takes at least ``max(bytes /
bandwidth, flops / peak)`` seconds; which limit binds depends on its intensity (FLOPs per byte).
Only the minimum number of bytes is counted, so reading data twice does not raise a kernel's share
of the limit. The limits are the best that any run of the study measured. If no run measured limits,
there are no shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import ceil, floor, log10

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.model.cell_model import Cell
from labkit.records import Record

METRIC = "dispatch_us"
X_LABEL = "intensity (FLOP per byte)"
Y_LABEL = "GFLOP/s"
PADDING_DECADES = 0.1  # between the outermost points and the edges
MARK_SPACING = 0.018  # between marks of one case, as a share of the panel's width
MAX_LABELS = 60  # more labels would cover the marks; then only the tooltips name the cases
MAX_POINTS = 300  # of an arm; more are thinned
LABEL_WIDTH, LABEL_HEIGHT = 0.03, 0.045  # of a case's number, as shares of the panel
ExponentRange = tuple[float, float]  # exponents of ten


@dataclass(frozen=True)
class RooflineLimits:
    """Bandwidth (GB/s, 1e9 bytes) and peak (GFLOP/s), and how they were measured."""

    read_gb_s: float
    sgemm_gflop_s: float
    threads: int
    read_bytes: int

    def text(self) -> str:
        return (
            f"Limits: {self.read_gb_s:,.1f} GB/s reading {self.read_bytes >> 20} MiB, "
            f"{self.sgemm_gflop_s:,.1f} GFLOP/s in a float32 matrix product of NumPy's BLAS, "
            f"{self.threads} threads; the best that any run measured after its kernels."
        )


@dataclass(frozen=True)
class RooflinePoint:
    """One case of one arm: its bytes, FLOPs and median time, and the rates that follow."""

    case: str
    arm: str
    bytes: int
    flops: int
    seconds: float
    limits: RooflineLimits | None

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def gb_s(self) -> float:
        """Attained GB/s, counting only the bytes that must move."""
        return self.bytes / self.seconds / 1e9

    @property
    def gflop_s(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def bound(self) -> str | None:
        """The binding limit, ``memory`` or ``compute``, or None if no limits were measured."""
        if self.limits is None:
            return None
        memory_s, compute_s = self._min_times_s(self.limits)
        return "memory" if memory_s >= compute_s else "compute"

    @property
    def share(self) -> float | None:
        """The least possible time over the measured; above 1 only if a cache held some data."""
        return None if self.limits is None else max(self._min_times_s(self.limits)) / self.seconds

    def _min_times_s(self, limits: RooflineLimits) -> tuple[float, float]:
        return (self.bytes / (limits.read_gb_s * 1e9), self.flops / (limits.sgemm_gflop_s * 1e9))


def _best_limits(records: Iterable[Record]) -> RooflineLimits | None:
    """Return the highest limits in any record, or None if no record has limits."""
    notes = [r.known_notes["limits"] for r in records if r.ok and r.known_notes.get("limits")]
    if not notes:
        return None
    return RooflineLimits(
        read_gb_s=max(float(n["read_gb_s"]) for n in notes),
        sgemm_gflop_s=max(float(n["sgemm_gflop_s"]) for n in notes),
        threads=max(int(n["threads"]) for n in notes),
        read_bytes=max(int(n["read_bytes"]) for n in notes),
    )


def roofline_points(cell: Cell, records: Sequence[Record]) -> list[RooflinePoint]:
    """Return a point for each case of each arm (except the control) whose records note the work."""
    limits = _best_limits(records)
    work: dict[tuple[str, str], tuple[int, int]] = {}
    for record in records:
        for case in record.cases:
            note = case.known_notes
            if note.get("flops") and note.get("least_bytes"):
                work[case.case, record.arm] = int(note["least_bytes"]), int(note["flops"])
    return [
        RooflinePoint(row.case, arm, *work[row.case, arm], median / 1e6, limits)
        for row in cell.rows
        if row.metric == METRIC
        for arm in cell.real_arms
        if (row.case, arm) in work and (median := row.median(arm))
    ]


def _axis_ranges(points: Sequence[RooflinePoint]) -> tuple[ExponentRange, ExponentRange]:
    x, y = [p.intensity for p in points], [p.gflop_s for p in points]
    limits = points[0].limits
    if limits is not None:
        x += [limits.sgemm_gflop_s / limits.read_gb_s]
        y += [limits.sgemm_gflop_s]
    return _exponent_range(x), _exponent_range(y)


def _exponent_range(values: Sequence[float]) -> ExponentRange:
    low, high = log10(min(values)), log10(max(values))
    return min(floor(low), low - PADDING_DECADES), max(ceil(high), high + PADDING_DECADES)


def _roof(points: Sequence[RooflinePoint], x: ExponentRange) -> list[tuple[float, float]]:
    """Return the vertices (intensity, GFLOP/s) of the roof; empty if no limits were measured."""
    limits = points[0].limits
    if limits is None:
        return []
    corner = limits.sgemm_gflop_s / limits.read_gb_s
    intensities = (10 ** x[0], corner, 10 ** x[1])
    return [(i, min(i * limits.read_gb_s, limits.sgemm_gflop_s)) for i in intensities]


def _case_numbers(points: Sequence[RooflinePoint]) -> dict[str, int]:
    """Return each case's number, from 1. Marks have numbers because names would not fit."""
    return {case: n for n, case in enumerate(dict.fromkeys(p.case for p in points), 1)}


def cases_line(points: Sequence[RooflinePoint]) -> str:
    """Return the legend's line: each case's number and name, and why marks stand side by side."""
    numbers = _case_numbers(points)
    text = f"{len(numbers):,}; the tooltips of the marks name them"
    if len(numbers) <= MAX_LABELS:
        text = "; ".join(f"{n} {case}" for case, n in numbers.items())
    arms = len({p.arm for p in points})
    alike = len({(p.case, p.intensity) for p in points}) == len(numbers)
    same = "have the same intensity and " if alike else ""
    side_by_side = f"; arms of a case {same}are drawn side by side"
    return f"Cases: {text}{side_by_side if arms > 1 else ''}"


def _mark_positions(points: Sequence[RooflinePoint], x: ExponentRange) -> list[tuple[float, float]]:
    """Return the position of every point in exponents of ten, with a case's arms side by side."""
    arms = list(dict.fromkeys(p.arm for p in points))
    step = MARK_SPACING * (x[1] - x[0])
    middle = (len(arms) - 1) / 2
    return [
        (log10(p.intensity) + (arms.index(p.arm) - middle) * step, log10(p.gflop_s)) for p in points
    ]


@dataclass(frozen=True)
class _CaseLabel:
    """A case's number beside its marks, in shares of the panel; ``right``: to the right of them."""

    text: str
    x: float
    y: float
    right: bool

    @property
    def middle(self) -> float:
        return self.x + (LABEL_WIDTH if self.right else -LABEL_WIDTH) / 2

    def is_free(self, occupied: Iterable[tuple[float, float]]) -> bool:
        return not any(
            abs(self.middle - a) < LABEL_WIDTH and abs(self.y - b) < LABEL_HEIGHT
            for a, b in occupied
        )


def _case_labels(
    points: Sequence[RooflinePoint], x: ExponentRange, y: ExponentRange
) -> list[_CaseLabel]:
    """Return a label beside each case's marks, lower if neither side is free; none if too many."""
    numbers = _case_numbers(points)
    if len(numbers) > MAX_LABELS:
        return []
    marks: dict[str, list[tuple[float, float]]] = {}
    for p, (a, b) in zip(points, _mark_positions(points, x), strict=True):
        position = (a - x[0]) / (x[1] - x[0]), (b - y[0]) / (y[1] - y[0])
        marks.setdefault(p.case, []).append(position)
    occupied = [position for positions in marks.values() for position in positions]
    labels: list[_CaseLabel] = []
    for case, n in numbers.items():
        left, right = (end(a for a, _ in marks[case]) for end in (min, max))
        height = sum(b for _, b in marks[case]) / len(marks[case])
        sides = ((right + MARK_SPACING, True), (left - MARK_SPACING, False))
        heights = accumulate(repeat(-LABEL_HEIGHT / 2), initial=height)
        places = (_CaseLabel(str(n), at, b, side) for b in heights for at, side in sides)
        label = next(place for place in places if place.is_free(occupied))
        labels.append(label)
        occupied.append((label.middle, label.y))
    return labels


def roofline_chart(cell: Cell, points: Sequence[RooflinePoint]) -> Chart:
    """Return the roofline chart. ``points`` must not be empty."""
    x, y = _axis_ranges(points)
    chart = Chart("roofline", x, y, X_LABEL, Y_LABEL, height=340, log_scale=True)
    styles = arm_classes(cell)
    roof = [(log10(a), log10(b)) for a, b in _roof(points, x)]
    if roof:
        chart.line(roof, "zero")
    positions = _mark_positions(points, x)
    drawn = {
        arm: set(chart.thin([at for p, at in zip(points, positions, strict=True) if p.arm == arm],
                            arm, MAX_POINTS))
        for arm in dict.fromkeys(p.arm for p in points)
    }  # fmt: skip
    for p, position in zip(points, positions, strict=True):
        if position not in drawn[p.arm]:
            continue
        style, mark = styles[p.arm]
        share = "" if p.share is None else f", {p.share:.0%} of the limit"
        tip = f"{p.case}, {p.arm}: {p.gflop_s:,.1f} GFLOP/s, {p.gb_s:,.1f} GB/s{share}"
        chart.dot(*position, style, mark, tip, arm=p.arm)
    for label in _case_labels(points, x, y):
        at = x[0] + label.x * (x[1] - x[0]), y[0] + label.y * (y[1] - y[0])
        anchor = "start" if label.right else "end"
        chart.text(*at, label.text, anchor)
    return chart
