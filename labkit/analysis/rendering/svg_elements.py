"""SVG charts written as text: axes, dots, lines and bars, coloured by the page's style sheet.

A report with such charts is one small file and follows the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape


def linear_ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def power_of_ten_ticks(low: float, high: float) -> list[float]:
    """Return the base-10 logarithms of the ticks between the exponents ``low`` and ``high``.

    A range of up to two decades has ticks at 1, 2 and 5 times a power of ten. A longer range has
    ticks at powers of ten only.
    """
    multiples = (1, 2, 5) if high - low <= 2 else (1,)
    exponents = range(math.floor(low), math.ceil(high) + 1)
    marks = [e + math.log10(m) for e in exponents for m in multiples]
    return [mark for mark in marks if low - 1e-9 <= mark <= high + 1e-9]


def power_of_ten_text(exponent: float) -> str:
    """Return the tick label of ``10**exponent``: ``0.5`` for -0.301."""
    return tick_text(10.0**exponent)


def tick_text(value: float) -> str:
    """Return a tick's label."""
    if value == 0:
        return "0"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


@dataclass
class SvgChart:
    """A chart of fixed size in view-box units; the page scales it to its width.

    Parameters
    ----------
    title
        Name for screen readers.
    x, y
        Range of each axis: (low, high) in data units.
    x_label, y_label
        Labels of the axes.
    width, height
        Size in view-box units.
    left, bottom
        Space for the labels of the y and x axes.
    log_scale
        Whether data units are exponents of ten. The axes then show the powers of ten.
    x_ticks
        The x axis' ticks, (position in data units, label) each; None: round numbers.
    """

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str = ""
    width: int = 760
    height: int = 280
    left: int = 70
    bottom: int = 44
    log_scale: bool = False
    x_ticks: tuple[tuple[float, str], ...] | None = None
    parts: list[str] = field(default_factory=list)

    def px(self, x: float) -> float:
        """Return the horizontal position of ``x`` in view-box units."""
        low, high = self.x
        return self.left + (x - low) / ((high - low) or 1.0) * (self.width - self.left - 14)

    def py(self, y: float) -> float:
        """Return the vertical position of ``y`` in view-box units."""
        low, high = self.y
        return (
            self.height
            - self.bottom
            - (y - low) / ((high - low) or 1.0) * (self.height - self.bottom - 12)
        )

    def axes(self, y_ticks: bool = True) -> None:
        """Draw grid, ticks and labels."""
        top, floor = 12, self.height - self.bottom
        ticks = power_of_ten_ticks if self.log_scale else linear_ticks
        label = power_of_ten_text if self.log_scale else tick_text
        x_ticks = self.x_ticks or tuple((value, label(value)) for value in ticks(*self.x))
        for value, text in x_ticks:
            at = f"{self.px(value):.1f}"
            anchor = "end" if self.px(value) > self.width - 24 else "middle"
            self.parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top}" y2="{floor}"/>')
            self.parts.append(
                f'<text x="{at}" y="{floor + 16}" text-anchor="{anchor}">{text}</text>'
            )
        for value in ticks(*self.y) if y_ticks else ():
            at = f"{self.py(value):.1f}"
            self.parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.width - 14}" y1="{at}" y2="{at}"/>'
            )
            self.text(self.left - 6, self.py(value), label(value))
        middle = (self.left + self.width - 14) / 2
        self.parts.append(
            f'<text x="{middle:.0f}" y="{self.height - 6}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
        )
        if self.y_label:
            center = (top + floor) / 2
            self.parts.append(
                f'<text transform="translate(14 {center:.0f}) rotate(-90)" text-anchor="middle">'
                f"{escape(self.y_label)}</text>"
            )

    def band(self, x0: float, x1: float, style: str) -> None:
        """Shade the full height from ``x0`` to ``x1``."""
        left, right = sorted((self.px(x0), self.px(x1)))
        self.parts.append(
            f'<rect class="{style}" x="{left:.1f}" y="12" width="{right - left:.1f}" '
            f'height="{self.height - self.bottom - 12}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{style}" points="{path}"/>')

    def bar(
        self, x: tuple[float, float], y: tuple[float, float], style: str, tip: str = ""
    ) -> None:
        """Draw a filled rectangle that spans ``x`` and ``y``, with an optional tooltip."""
        left, right = sorted(map(self.px, x))
        top, floor = sorted(map(self.py, y))
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<rect class="bar {style}" x="{left:.1f}" y="{top:.1f}" '
            f'width="{right - left:.1f}" height="{floor - top:.1f}">{title}</rect>'
        )

    def dot(
        self, x: float, y: float, style: str, mark: str = "circle", tip: str = "", link: str = ""
    ) -> None:
        """Draw a mark, with an optional tooltip and link; ``mark`` is one of MARKS or ``cross``."""
        svg = _mark(mark, self.px(x), self.py(y), style, escape(tip))
        self.parts.append(f'<a href="{escape(link)}">{svg}</a>' if link else svg)

    def text(self, x: float, y: float, text: str, anchor: str = "end") -> None:
        """Draw text at a position in view-box units."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" dy="4" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the chart as an ``<svg>`` element."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}">' + "".join(self.parts) + "</svg>"
        )


MARKS = ("circle", "square", "triangle", "diamond")


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


def padded_range(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """Return the range of the values, widened on both sides by ``share`` of the range."""
    low, high = min(values), max(values)
    padding = (high - low) * share or abs(high) * share or 1.0
    return low - padding, high + padding
