"""Charts as data: marks in data units, declared once and drawn at any width.

:mod:`labkit.analysis.document.svg_chart_renderer` draws a chart as an ``<svg>`` of fixed width,
which readers without JavaScript see. :meth:`Chart.to_json` gives the page's script the same marks.
The script draws them at the width of the screen, with tooltips, a crosshair and, if ``zooms``, a
zoom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.analysis.number_format import percent_text, unit_name, value_text
from labkit.config import count_text

Point = tuple[float, float]
Json = dict[str, Any]
ROW_HEIGHT = 22  # of a row that holds one thing
MAX_POINTS = 1_000  # of a line or of the dots of one arm; more are thinned


@dataclass(frozen=True)
class Line:
    """A line through points, with the style class ``style``."""

    points: tuple[Point, ...]
    style: str
    arm: str = ""


@dataclass(frozen=True)
class Dots:
    """Marks at points; ``mark`` is one of the renderer's ``MARKS``.

    ``tips`` and ``links`` are either empty or as long as ``points``. Without tips, a dot's tooltip
    is its arm, its entry of ``x_names`` (or its x) and its y.
    """

    points: tuple[Point, ...]
    style: str
    mark: str
    arm: str = ""
    tips: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bars:
    """Filled rectangles, each (left, right, bottom, top), and their tooltips (empty for none)."""

    boxes: tuple[tuple[float, float, float, float], ...]
    style: str
    arm: str = ""
    tips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Band:
    """A shaded stripe from ``low`` to ``high``: vertical, or horizontal if ``across``."""

    low: float
    high: float
    style: str
    across: bool = False


@dataclass(frozen=True)
class Text:
    """Text beside a point, moved by ``dx`` and ``dy`` units of the picture."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    dx: float = 0.0
    dy: float = 0.0


@dataclass(frozen=True)
class Limit:
    """A vertical line at ``x`` over the full height, with its name at the top."""

    x: float
    name: str


Mark = Line | Dots | Bars | Band | Text | Limit


@dataclass
class Chart:
    """A chart: ranges, labels, and the marks in the order in which they are drawn."""

    title: str  # name for screen readers
    # x, y: range of each axis: (low, high) in data units.
    x: tuple[float, float]
    y: tuple[float, float]
    # x_label, y_label: labels of the axes.
    x_label: str
    y_label: str = ""
    # Height in units of the picture. A chart with ``rows`` ignores it: its height follows from
    # their number.
    height: int = 280
    # Names of the rows of a chart whose y axis lists things, from the top. The middle of row ``i``
    # is at y = ``len(rows) - i - 0.5``. On a narrow screen names stand above their rows.
    rows: tuple[str, ...] = ()
    row_height: int = ROW_HEIGHT  # height of a row in units of the picture
    # Whether data units are exponents of ten. The axes then show the powers of ten.
    log_scale: bool = False
    # The x axis' ticks, (position in data units, label) each; None: round numbers.
    x_ticks: tuple[tuple[float, str], ...] | None = None
    y_ticks: bool = True  # whether the y axis has ticks
    # Names of x = 1, 2, ..., such as runs. They are used in tooltips.
    x_names: tuple[str, ...] = ()
    # x_unit, unit: the units of x and y, used in tooltips.
    x_unit: str = ""
    unit: str | None = None
    signed: bool = False  # whether y is a difference in percent, written with its sign
    # Prefix of links to the runs in ``x_names``; None if ``x_names`` are not runs.
    record_folder: str | None = None
    # Charts of a cell with the same link share their crosshair: ``run``, ``block``, ``time``.
    link: str = ""
    # Whether the x axis can be zoomed. A zoomed chart leaves out the rectangles outside the view
    # and draws the others taller.
    zooms: bool = False
    marks: list[Mark] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], style: str, arm: str = "") -> None:
        """Draw a line through points, or through their extremes if there are very many."""
        self.marks.append(Line(tuple(self.thin(points, arm)), style, arm))

    def dots(self, points: Sequence[Point], style: str, mark: str, arm: str = "") -> None:
        """Draw marks of one style whose tooltips use ``x_names``."""
        self.marks.append(Dots(tuple(self.thin(points, arm)), style, mark, arm))

    def dot(
        self, x: float, y: float, style: str, mark: str = "circle", tip: str = "", link: str = "",
        arm: str = "",
    ) -> None:  # fmt: skip
        tips, links = (tip,) if tip else (), (link,) if link else ()
        last = self.marks[-1] if self.marks else None
        if isinstance(last, Dots) and (last.style, last.mark, last.arm) == (style, mark, arm):
            points = (*last.points, (x, y))
            self.marks[-1] = replace(
                last, points=points, tips=last.tips + tips, links=last.links + links
            )
        else:
            self.marks.append(Dots(((x, y),), style, mark, arm, tips, links))

    def effect(
        self,
        x: float,
        interval: tuple[float, float] | None,
        y: float,
        look: tuple[str, str],
        tip: str,
        arm: str,
    ) -> None:
        """Draw an effect and its interval. ``look``: style class and mark."""
        if interval is not None:
            self.line([(end, y) for end in interval], f"line {look[0]}", arm)
        self.dot(x, y, *look, tip, arm=arm)

    def bar(self, x: Point, y: Point, style: str, tip: str = "", arm: str = "") -> None:
        last, box = self.marks[-1] if self.marks else None, (*x, *y)
        if isinstance(last, Bars) and (last.style, last.arm) == (style, arm):
            boxes, tips = (*last.boxes, box), (*last.tips, tip)
            self.marks[-1] = replace(last, boxes=boxes, tips=tips)
        else:
            self.marks.append(Bars((box,), style, arm, (tip,)))

    def band(self, low: float, high: float, style: str, across: bool = False) -> None:
        """Shade the chart from ``low`` to ``high`` over its full height (``across``: width)."""
        self.marks.append(Band(low, high, style, across))

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", dx: float = 0, dy: float = 0
    ) -> None:
        self.marks.append(Text(x, y, text, anchor, dx, dy))

    def limit(self, x: float, name: str) -> None:
        self.marks.append(Limit(x, name))

    def tip(self, dots: Dots, index: int) -> str:
        """Return a dot's own tooltip, or else its arm, its place and its value.

        The place is the dot's name in ``x_names`` or, without names, x with its unit.
        """
        if dots.tips:
            return dots.tips[index]
        x, y = dots.points[index]
        where = self.x_names[round(x) - 1] if self.x_names else f"{value_text(x)} {self.x_unit}"
        value = percent_text(y) if self.signed else f"{value_text(y)} {unit_name(self.unit)}"
        return f"{dots.arm}, {where}: {value}".strip()

    def href(self, dots: Dots, index: int) -> str:
        if dots.links or self.record_folder is None or not self.x_names:
            return dots.links[index] if dots.links else ""
        run = self.x_names[round(dots.points[index][0]) - 1]
        return f"{self.record_folder}runs/{run}.json"

    def thin(self, points: Sequence[Point], name: str, most: int = MAX_POINTS) -> Sequence[Point]:
        """Return the points, or their lowest and highest points if there are more than ``most``.

        If points are left out, ``thinned`` gets a note, which names the points ``name``.
        """
        if len(points) <= most:
            return points
        kept = _extremes(points, most // 2)
        of = f" of {name}" if name else ""
        note = (
            f"{len(kept):,} of {count_text(len(points), 'point')}{of} are drawn: the lowest and "
            f"the highest of each of {most // 2} parts of the axis"
        )
        if note not in self.thinned:
            self.thinned.append(note)
        return kept

    def to_json(self) -> Json:
        """Return the chart for the page's script. Defaults are left out."""
        content: Json = {
            "title": self.title,
            "x": _rounded(self.x),
            "y": _rounded(self.y),
            "xLabel": self.x_label,
            "yLabel": self.y_label,
            "height": self.height,
            "rows": list(self.rows),
            "rowHeight": self.row_height if self.rows else None,
            "log": self.log_scale,
            "xTicks": None if self.x_ticks is None else [list(tick) for tick in self.x_ticks],
            "noYTicks": not self.y_ticks,
            "names": list(self.x_names),
            "xUnit": self.x_unit,
            "unit": unit_name(self.unit),
            "signed": self.signed,
            "link": self.link,
            "zooms": self.zooms,
            "marks": [_mark_json(mark) for mark in self.marks],
        }
        records = {} if self.record_folder is None else {"records": self.record_folder}
        return _without_defaults(content) | records


def changes(base: Json, other: Json) -> Json:
    """Return the entries of ``other`` that differ from ``base``; the page's script applies them.

    If the marks differ only in y, the key ``ys`` replaces ``marks``. It holds the new y values of
    each mark, or None for a mark without a change. In this form, a thousand charts of the same runs
    take a fifth of the space.
    """
    keys = dict.fromkeys([*base, *other])
    old, new = base["marks"], other["marks"]
    changed = (key for key in keys if key != "marks" and base.get(key) != other.get(key))
    different = {key: other.get(key) for key in changed}
    if old == new:
        return different
    if [*map(_without_y, old)] != [*map(_without_y, new)]:
        return {**different, "marks": new}
    ys = [None if a == b else b["p"][1::2] for a, b in zip(old, new, strict=True)]
    return {**different, "ys": ys}


def _without_y(mark: Json) -> Json:
    points = mark["p"][::2] if mark["k"] in ("line", "dots") else mark["p"]
    return {**mark, "p": points}


def _extremes(points: Sequence[Point], parts: int) -> list[Point]:
    """Return the lowest and highest point in each of ``parts`` equal parts of the x axis.

    Points keep their order, and the first and the last are always included. No peak is lost, as it
    could be if every n-th point were drawn.
    """
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    scale = parts / ((high - low) or 1.0)
    ends: dict[int, tuple[int, int]] = {}
    for index, (x, y) in enumerate(points):
        part = min(parts - 1, int((x - low) * scale))
        lowest, highest = ends.get(part, (index, index))
        lowest = index if y < points[lowest][1] else lowest
        ends[part] = lowest, index if y > points[highest][1] else highest
    kept = {0, len(points) - 1, *(index for pair in ends.values() for index in pair)}
    return [points[index] for index in sorted(kept)]


def padded_range(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return the range of the values, widened on both sides by ``share`` of the range."""
    low, high = min(values), max(values)
    padding = (high - low) * share or abs(high) * share or 1.0
    return low - padding, high + padding


def _rounded(values: Sequence[float]) -> list[float]:
    return [_compact(value) for value in values]


def _compact(value: float) -> float:
    """Round a value to 6 significant digits, without a fraction if it is whole."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and math.isfinite(rounded) else rounded


def _without_defaults(content: Json) -> Json:
    return {key: value for key, value in content.items() if value not in (None, "", [], False)}


def _flat(points: Iterable[Iterable[float]]) -> list[float]:
    return [_compact(value) for point in points for value in point]


def _mark_json(mark: Mark) -> Json:
    match mark:
        case Line():
            content: Json = {"k": "line", "c": mark.style, "a": mark.arm, "p": _flat(mark.points)}
        case Dots():
            content = {"k": "dots", "c": mark.style, "m": mark.mark, "a": mark.arm}
            content |= {"p": _flat(mark.points), "t": list(mark.tips), "h": list(mark.links)}
        case Band():
            content = {"k": "band", "c": mark.style, "p": _rounded((mark.low, mark.high))}
            content["across"] = mark.across
        case Text():
            content = {"k": "text", "p": _rounded((mark.x, mark.y)), "t": mark.text}
            content |= {"s": mark.anchor, "d": [mark.dx, mark.dy]}
        case Limit():
            content = {"k": "limit", "p": [_compact(mark.x)], "t": mark.name}
        case Bars():
            content = {"k": "bars", "c": mark.style, "a": mark.arm, "p": _flat(mark.boxes)}
            content["t"] = list(mark.tips) if any(mark.tips) else []
    return _without_defaults(content)
