"""Charts drawn as SVG text, coloured by the page's style sheet, and the style of each arm.

A report with such charts is one small file and follows the reader's light or dark mode. The
colour-blind can tell the colours apart (M. Okabe and K. Ito, 2008). No two of the first
``NUM_STYLES`` arms or curves share both colour and mark, or both colour and dashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from labkit.analysis.document.chart import Band, Bars, Chart, Dots, Limit, Line, Mark, Text
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import MINUS, significant_text

WIDTH = 760  # of the picture, in its own units; the page scales it
TOP, RIGHT, BOTTOM, LEFT = 12, 14, 44, 70  # space around the panel
MAX_NAME_WIDTH = 400
CHARACTER = 7.1  # average width of a character of a row's name
MAX_RECTANGLES = 60  # of one style
MARKS = ("circle", "square", "triangle", "diamond")
OFFSET = 8  # pixels from a point to its name
LINE_HEIGHT, ABOVE = 15, -10  # pixels: a line of text, and a name's baseline above its point
MAX_LINES = 10  # that a name is moved up or down
PHONE_PANEL = 230  # pixels: the panel's width on a narrow phone
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
CONTROL_COLOUR = "#888888"
DASHES = ("", " dashed", " dotted", " dashdot")  # classes of the style sheet
NUM_STYLES = len(COLOURS) * len(MARKS)
Tick = tuple[float, str]  # the place in data units, and the text


def _linear_ticks(low: float, high: float, max_ticks: int = 6) -> list[Tick]:
    """Return multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``."""
    span = high - low
    if span <= 0:
        return [(low, significant_text(low, 4).replace("-", MINUS))]
    rough = span / max_ticks
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    values = (round(i * step, -exponent) for i in range(first, last + 1))
    return [(value, _tick_text(value, -exponent)) for value in values]


def _power_of_ten_ticks(low: float, high: float) -> list[Tick]:
    """Return the base-10 logarithms of the ticks between the exponents ``low`` and ``high``.

    A range of up to two decades has ticks at 1, 2 and 5 times a power of ten. A longer range has
    ticks at powers of ten only.
    """
    multiples = (1, 2, 5) if high - low <= 2 else (1,)
    exponents = range(math.floor(low), math.ceil(high) + 1)
    marks = [(e + math.log10(m), e) for e in exponents for m in multiples]
    return [
        (mark, _tick_text(10.0**mark, -exponent))
        for mark, exponent in marks
        if low - 1e-9 <= mark <= high + 1e-9
    ]


def _tick_text(value: float, decimals: int) -> str:
    """Write a tick with the decimals of the ticks' step, without zeros at its end."""
    text = f"{value:,.{max(0, decimals)}f}"
    return (text.rstrip("0").removesuffix(".") if "." in text else text).replace("-", MINUS)


def chart_svg(chart: Chart) -> str:
    """Return a chart as an ``<svg>`` element."""
    panel = _Panel.of(chart)
    parts = [*panel.axes(), *(text for mark in chart.marks for text in panel.mark(mark))]
    # A picture's content is hidden from assistive software, and so would its links be.
    role = "group" if any("<a " in part for part in parts) else "img"
    return (
        f'<svg viewBox="0 0 {WIDTH} {panel.height}" role="{role}" '
        f'aria-label="{escape(chart.title)}">' + "".join(parts) + "</svg>"
    )


@dataclass(frozen=True)
class _Panel:
    """A chart, the picture's height, and the left edge of the chart's panel in the picture."""

    chart: Chart
    height: int
    left: int

    @classmethod
    def of(cls, chart: Chart) -> _Panel:
        if not chart.rows:
            return cls(chart, chart.height, LEFT)
        widest = round(CHARACTER * max(map(len, chart.rows)))
        height = chart.row_height * len(chart.rows) + TOP + BOTTOM
        return cls(chart, height, min(MAX_NAME_WIDTH, 16 + widest))

    def px(self, x: float) -> float:
        """Return the horizontal position of ``x`` in units of the picture."""
        low, high = self.chart.x
        return self.left + (x - low) / ((high - low) or 1.0) * (WIDTH - self.left - RIGHT)

    def py(self, y: float) -> float:
        """Return the vertical position of ``y`` in units of the picture."""
        low, high = self.chart.y
        floor = self.height - BOTTOM
        return floor - (y - low) / ((high - low) or 1.0) * (floor - TOP)

    def axes(self) -> list[str]:
        chart, floor = self.chart, self.height - BOTTOM
        ticks = _power_of_ten_ticks if chart.log_scale else _linear_ticks
        parts = []
        for value, text in chart.x_ticks or ticks(*chart.x):
            at = f"{self.px(value):.1f}"
            anchor = "end" if self.px(value) > WIDTH - 24 else "middle"
            parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{floor}"/>')
            parts.append(f'<text x="{at}" y="{floor + 16}" text-anchor="{anchor}">{text}</text>')
        for value, text in ticks(*chart.y) if chart.y_ticks and not chart.rows else ():
            at = f"{self.py(value):.1f}"
            parts.append(
                f'<line class="grid" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
            )
            parts.append(_text(self.left - 6, self.py(value), text, "end"))
        for index, name in enumerate(chart.rows):
            middle = self.py(chart.y[0] + len(chart.rows) - index - 0.5)
            parts.append(_text(self.left - 8, middle, name, "end"))
        middle = (self.left + WIDTH - RIGHT) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{self.height - 6}" text-anchor="middle">'
            f"{escape(chart.x_label)}</text>"
        )
        if chart.y_label:
            parts.append(
                f'<text transform="translate(14 {(TOP + floor) / 2:.0f}) rotate(-90)" '
                f'text-anchor="middle">{escape(chart.y_label)}</text>'
            )
        return parts

    def mark(self, mark: Mark) -> list[str]:
        match mark:
            case Line():
                path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in mark.points)
                return [f'<polyline class="{mark.style}" points="{path}"/>']
            case Dots():
                return [self._dot(mark, index) for index in range(len(mark.points))]
            case Bars():
                return self._bars(mark)
            case Band():
                x, y = (mark.low, mark.high), self.chart.y
                return [self._rect(mark.style, *((self.chart.x, x) if mark.across else (x, y)))]
            case Text():
                at = self.px(mark.x) + mark.dx, self.py(mark.y) + mark.dy
                return [_text(*at, mark.text, mark.anchor)]
            case Limit():
                return self._limit(mark)

    def _dot(self, dots: Dots, index: int) -> str:
        x, y = dots.points[index]
        tip, link = self.chart.tip(dots, index), self.chart.href(dots, index)
        svg = _mark(dots.mark, self.px(x), self.py(y), dots.style, escape(tip))
        return f'<a href="{escape(link)}">{svg}</a>' if link else svg

    def _bars(self, bars: Bars) -> list[str]:
        """Return a rectangle per bar. Very many bars become one path without tooltips."""
        if len(bars.boxes) <= MAX_RECTANGLES:
            titles = (f"<title>{escape(tip)}</title>" if tip else "" for tip in bars.tips)
            return [
                self._rect(f"bar {bars.style}", box[:2], box[2:], title)
                for box, title in zip(bars.boxes, titles, strict=True)
            ]
        path = "".join(
            f"M{self.px(left):.1f} {self.py(top):.1f}H{self.px(right):.1f}V{self.py(bottom):.1f}"
            f"H{self.px(left):.1f}z"
            for left, right, bottom, top in bars.boxes
        )
        return [f'<path class="bar {bars.style}" d="{path}"/>']

    def _rect(
        self, style: str, x: tuple[float, float], y: tuple[float, float], inside: str = ""
    ) -> str:
        left, right = sorted(map(self.px, x))
        top, floor = sorted(map(self.py, y))
        return (
            f'<rect class="{style}" x="{left:.1f}" y="{top:.1f}" '
            f'width="{right - left:.1f}" height="{floor - top:.1f}">{inside}</rect>'
        )

    def _limit(self, limit: Limit) -> list[str]:
        at = self.px(limit.x)
        anchor, dx = ("end", -5) if at > WIDTH * 0.7 else ("start", 5)
        floor = self.height - BOTTOM
        return [
            f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{floor}"/>',
            _text(at + dx, TOP + 8, limit.name, anchor),
        ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" dy="4" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(mark: str, x: float, y: float, style: str, tip: str) -> str:
    title = f"<title>{tip}</title>" if tip else ""
    if mark == "circle":
        return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
    shapes: dict[str, list[tuple[float, float]]] = {
        "square": [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        "triangle": [(0, -5), (5, 4), (-5, 4)],
        "diamond": [(0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)],
        "cross": [(-4, -5), (0, -1), (4, -5), (5, -4), (1, 0), (5, 4), (4, 5), (0, 1),
                  (-4, 5), (-5, 4), (-1, 0), (-5, -4)],
    }  # fmt: skip
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[mark])
    return f'<polygon class="{style}" points="{points}">{title}</polygon>'


def mark_svg(mark: str, style: str) -> str:
    """Return a mark centred in a 14 by 14 view box, for a legend."""
    return _mark(mark, 7.0, 7.0, style, "")


def add_point_labels(chart: Chart, labels: Iterable[tuple[float, float, str]]) -> None:
    """Write names beside their points: right of them in the panel's left half, else left of them.

    The names of points that lie together are stacked, upwards first, and a dotted line leads from a
    point to a name that is not next to it. A name without a free place stands directly above its
    point. The width is that of a phone: on a wider screen names are further apart. ``chart``:
    a chart of fixed height whose ranges are final. ``labels``: (x, y, name) of each point, in data
    units.
    """
    height = chart.height - TOP - BOTTOM
    scale_x = PHONE_PANEL / (chart.x[1] - chart.x[0])
    scale_y = height / (chart.y[1] - chart.y[0])
    lines = sorted(range(-MAX_LINES, MAX_LINES + 1), key=abs)
    drawn: list[tuple[float, float, float]] = []  # left, right, baseline
    for x, y, name in labels:
        at, above = (x - chart.x[0]) * scale_x, (chart.y[1] - y) * scale_y
        width = CHARACTER * len(name) + OFFSET
        is_left = x < sum(chart.x) / 2
        left, right = (at, at + width) if is_left else (at - width, at)
        beside = [line for start, end, line in drawn if right > start and left < end]
        free = (
            dy
            for dy in (ABOVE + LINE_HEIGHT * line for line in lines)
            if LINE_HEIGHT - 4 <= above + dy <= height
            if all(abs(above + dy - line) >= LINE_HEIGHT for line in beside)
        )
        shift = next(free, ABOVE)
        drawn.append((left, right, above + shift))
        dx, anchor = (OFFSET, "start") if is_left else (-OFFSET, "end")
        chart.text(x, y, name, anchor, dx=dx, dy=shift)
        if abs(shift - ABOVE) > LINE_HEIGHT:
            chart.line([(x, y), (x, y - shift / scale_y)], "leader")


def page_style_of(index: int) -> tuple[str, str]:
    """Return the style class and mark, on the HTML page, of the arm or curve with this index."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return f"arm{index % len(COLOURS)}{dashes}", MARKS[(index + index // len(COLOURS)) % len(MARKS)]


def arm_classes(cell: Cell) -> dict[str, tuple[str, str]]:
    """Return the style class and mark of every arm. The control has grey crosses."""
    styles = {name: page_style_of(index) for index, name in enumerate(cell.real_arms)}
    return styles if cell.control is None else {**styles, cell.control: ("control", "cross")}
