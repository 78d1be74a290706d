"""How near kernels come to the machine's limits: bytes, FLOPs, intensity, share.

S. Williams, A. Waterman, D. Patterson, "Roofline" (2009): work of intensity I (FLOPs per
byte) takes at least ``max(bytes / bandwidth, flops / peak)``. Bytes are the least that
must move, so a share is never flattered by what a kernel reads twice. The limits are the
best that any of the study's runs measured in itself; without them there are no shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import slug
from labkit.analysis.rendering.arm_styles import arm_classes, arm_styles
from labkit.analysis.rendering.svg_elements import SvgChart
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
METRIC = "dispatch_us"
X_LABEL = "intensity (FLOP per byte)"
Y_LABEL = "GFLOP/s"
ROOM = 0.1  # decades between the outermost points and the edges
MARK_SHARE = 0.018  # of the panel's width: from one mark to the next beside it
LABEL_WIDTH, LABEL_HEIGHT = 0.03, 0.045  # of the panel: what a case's number takes
Range = tuple[float, float]  # exponents of ten


@dataclass(frozen=True)
class RooflineLimits:
    """GB/s (1e9 bytes) and GFLOP/s, and how they were measured."""

    read_gb_s: float
    sgemm_gflop_s: float
    threads: int
    read_bytes: int

    def text(self) -> str:
        """Say what the limits are and where they come from."""
        return (
            f"Limits: {self.read_gb_s:,.1f} GB/s reading {self.read_bytes >> 20} MiB, "
            f"{self.sgemm_gflop_s:,.1f} GFLOP/s in a float32 matrix product of NumPy's BLAS, "
            f"{self.threads} threads; the best that any run measured after its kernels."
        )


@dataclass(frozen=True)
class RooflinePoint:
    """One case and arm: the work, the median time, and what follows from them."""

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
        """Achieved GB/s, counting only the bytes that must move."""
        return self.bytes / self.seconds / 1e9

    @property
    def gflop_s(self) -> float:
        """Achieved GFLOP/s."""
        return self.flops / self.seconds / 1e9

    @property
    def bound(self) -> str | None:
        """Name the limit that binds: ``memory`` or ``compute``; None without limits."""
        if self.limits is None:
            return None
        memory, compute = self._least_s(self.limits)
        return "memory" if memory >= compute else "compute"

    @property
    def share(self) -> float | None:
        """Least possible time over the time taken; above 1 only where a cache helped."""
        return None if self.limits is None else max(self._least_s(self.limits)) / self.seconds

    def _least_s(self, limits: RooflineLimits) -> tuple[float, float]:
        return (
            self.bytes / (limits.read_gb_s * 1e9),
            self.flops / (limits.sgemm_gflop_s * 1e9),
        )


def find_limits(records: Iterable[Record]) -> RooflineLimits | None:
    """Return the best limits that any run noted; None where no run did."""
    noted = [r.notes["limits"] for r in records if r.ok and r.notes.get("limits")]
    if not noted:
        return None
    return RooflineLimits(
        read_gb_s=max(float(n["read_gb_s"]) for n in noted),
        sgemm_gflop_s=max(float(n["sgemm_gflop_s"]) for n in noted),
        threads=max(int(n["threads"]) for n in noted),
        read_bytes=max(int(n["read_bytes"]) for n in noted),
    )


def roofline_points(cell: Json, records: Sequence[Record]) -> list[RooflinePoint]:
    """Return every case and arm (but the control) whose work the records know."""
    limits = find_limits(records)
    work: dict[str, tuple[int, int]] = {}
    for record in records:
        for case in record.cases:
            if case.notes.get("flops") and case.notes.get("least_bytes"):
                work[case.case] = (int(case.notes["least_bytes"]), int(case.notes["flops"]))
    return [
        RooflinePoint(
            row["case"], arm, *work[row["case"]], row["arms"][arm]["median"] / 1e6, limits
        )
        for row in cell["rows"]
        if row["metric"] == METRIC and row["case"] in work
        for arm in real_arms(cell)
        if row["arms"][arm]["median"]
    ]


def _ranges(found: Sequence[RooflinePoint]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the exponents of 10 between which all points and the roof's corner lie."""
    x, y = [p.intensity for p in found], [p.gflop_s for p in found]
    limits = found[0].limits
    if limits is not None:
        x += [limits.sgemm_gflop_s / limits.read_gb_s]
        y += [limits.sgemm_gflop_s]
    return _exponents(x), _exponents(y)


def _exponents(values: Sequence[float]) -> tuple[float, float]:
    low, high = log10(min(values)), log10(max(values))
    return min(floor(low), low - ROOM), max(ceil(high), high + ROOM)


def _roof(found: Sequence[RooflinePoint], x: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the roof's points (intensity, GFLOP/s); empty without limits."""
    limits = found[0].limits
    if limits is None:
        return []
    corner = limits.sgemm_gflop_s / limits.read_gb_s
    places = (10 ** x[0], corner, 10 ** x[1])
    return [(p, min(p * limits.read_gb_s, limits.sgemm_gflop_s)) for p in places]


def case_numbers(found: Sequence[RooflinePoint]) -> dict[str, int]:
    """Number the cases from 1: a number fits beside a mark where a name does not."""
    return {case: n for n, case in enumerate(dict.fromkeys(p.case for p in found), 1)}


def cases_line(found: Sequence[RooflinePoint]) -> str:
    """Name the cases by their numbers, and say why marks stand beside each other."""
    text = "; ".join(f"{n} {case}" for case, n in case_numbers(found).items())
    arms = len({p.arm for p in found})
    beside = "; arms of a case have one intensity and are drawn beside each other"
    return f"Cases: {text}{beside if arms > 1 else ''}"


def _places(found: Sequence[RooflinePoint], x: Range) -> list[tuple[float, float]]:
    """Place every point (exponents of 10): a case's arms side by side, around its intensity."""
    arms = list(dict.fromkeys(p.arm for p in found))
    step = MARK_SHARE * (x[1] - x[0])
    middle = (len(arms) - 1) / 2
    return [
        (log10(p.intensity) + (arms.index(p.arm) - middle) * step, log10(p.gflop_s)) for p in found
    ]


@dataclass(frozen=True)
class Label:
    """A case's number beside its marks (shares of the panel); ``right``: behind them."""

    text: str
    x: float
    y: float
    right: bool

    @property
    def middle(self) -> float:
        """Where the middle of its text is."""
        return self.x + (LABEL_WIDTH if self.right else -LABEL_WIDTH) / 2


def case_labels(found: Sequence[RooflinePoint], x: Range, y: Range) -> list[Label]:
    """Put every case's number right of its marks, or left, or lower: where there is room."""
    marks: dict[str, list[tuple[float, float]]] = {}
    for p, (a, b) in zip(found, _places(found, x), strict=True):
        share = (a - x[0]) / (x[1] - x[0]), (b - y[0]) / (y[1] - y[0])
        marks.setdefault(p.case, []).append(share)
    drawn = [share for shares in marks.values() for share in shares]
    labels: list[Label] = []
    for case, n in case_numbers(found).items():
        left, right = (end(a for a, _ in marks[case]) for end in (min, max))
        height = sum(b for _, b in marks[case]) / len(marks[case])
        while True:
            sides = [
                Label(str(n), right + MARK_SHARE, height, True),
                Label(str(n), left - MARK_SHARE, height, False),
            ]
            others = [*drawn, *((label.middle, label.y) for label in labels)]
            free = [label for label in sides if _free(label, others)]
            if free:
                labels.append(free[0])
                break
            height -= LABEL_HEIGHT / 2
    return labels


def _free(label: Label, others: Iterable[tuple[float, float]]) -> bool:
    """Tell whether a label covers no mark and no label before it."""
    return not any(
        abs(label.middle - a) < LABEL_WIDTH and abs(label.y - b) < LABEL_HEIGHT for a, b in others
    )


def roofline_chart(cell: Json, found: Sequence[RooflinePoint]) -> str:
    """Draw the roofline for the page; ``found``: one point at least."""
    x, y = _ranges(found)
    chart = SvgChart("roofline", x, y, X_LABEL, Y_LABEL, height=340, powers=True)
    chart.axes()
    styles = arm_classes(cell)
    roof = [(log10(a), log10(b)) for a, b in _roof(found, x)]
    if roof:
        chart.line(roof, "zero")
    for p, place in zip(found, _places(found, x), strict=True):
        style, mark = styles[p.arm]
        share = "" if p.share is None else f", {p.share:.0%} of the limit"
        tip = f"{p.case}, {p.arm}: {p.gflop_s:,.1f} GFLOP/s, {p.gb_s:,.1f} GB/s{share}"
        chart.dot(*place, style, mark, tip)
    for label in case_labels(found, x, y):
        at = x[0] + label.x * (x[1] - x[0]), y[0] + label.y * (y[1] - y[0])
        anchor = "start" if label.right else "end"
        chart.text(chart.px(at[0]), chart.py(at[1]), label.text, anchor)
    return chart.svg()


def roofline_figure(cell: Json, found: Sequence[RooflinePoint]) -> Figure:
    """Draw the roofline with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    panel = figure.subplots()
    x, y = _ranges(found)
    roof = _roof(found, x)
    if roof:
        panel.plot(*zip(*roof, strict=True), color="black", linewidth=1.2, label="limit")
    places = _places(found, x)
    for arm, (colour, mark) in arm_styles(cell).items():
        mine = [place for p, place in zip(found, places, strict=True) if p.arm == arm]
        if mine:
            powers = [10**a for a, _ in mine], [10**b for _, b in mine]
            panel.plot(*powers, mark, color=colour, markersize=5, label=arm)
    for label in case_labels(found, x, y):
        side = "left" if label.right else "right"
        panel.text(
            label.x, label.y, label.text, transform=panel.transAxes, fontsize=8, ha=side,
            va="center",
        )  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(10 ** x[0], 10 ** x[1])
    panel.set_ylim(10 ** y[0], 10 ** y[1])
    panel.set_xlabel(X_LABEL)
    panel.set_ylabel(Y_LABEL)
    panel.legend(loc="lower right")
    named = "\n".join(f"{n}  {case}" for case, n in case_numbers(found).items())
    panel.text(1.02, 1.0, named, transform=panel.transAxes, fontsize=8, va="top")
    return figure


def roofline_stem(cell: Json) -> str:
    """Name the files of a cell's roofline, without their endings."""
    return f"{slug(cell['cell'])}--roofline"
