"""Charts as PNG and SVG files: one renderer from a chart's declaration to matplotlib.

The same records give the same pictures byte for byte, because pictures hold no dates and have fixed
ids and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.document.chart import Band, Bars, Chart, Dots, Limit, Line, Mark, Text
from labkit.analysis.document.report_parts import ChartPart, PictureFile
from labkit.analysis.document.svg_chart_renderer import COLOURS, CONTROL_COLOUR
from labkit.analysis.pages.report_sections import MARKDOWN_SECTIONS
from labkit.records.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from labkit.analysis.pages.cell_report_content import CellReport

RC_PARAMS = {
    "svg.hashsalt": "labkit",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
METADATA_CHARACTERS = 2000  # within which an SVG file's description is found
PNG_DPI = 110
UNITS_PER_INCH = 72.0  # of a chart's height
WIDTH, PANEL_WIDTH, MAX_HEIGHT = 7.2, 4.2, 40.0  # inches
LEGEND_CHARACTERS = 90  # that fit into the width of a figure
SHAPES = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "cross": "x"}
DASHES = {"dashed": "--", "dotted": ":", "dashdot": "-."}
ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}
# Colour and opacity of each style class that is no arm, no curve and no series.
STYLES: dict[str, tuple[str, float]] = {
    "zero": ("black", 1.0),
    "link": ("#777777", 1.0),
    "control": (CONTROL_COLOUR, 1.0),
    "published": ("black", 1.0),
    "margin": (COLOURS[4], 0.2),
    "block": ("black", 0.04),
    "reserved": (COLOURS[0], 0.25),
    "used": (COLOURS[0], 1.0),
    "waiting": ("#c9ced4", 1.0),
    "prefill": (COLOURS[5], 1.0),
    "decode": (COLOURS[4], 1.0),
}


def write_figures(report: CellReport, folder: Path) -> None:
    """Write every picture that a cell's Markdown report shows."""
    for section in MARKDOWN_SECTIONS:
        for part in section.parts(report):
            if isinstance(part, PictureFile):
                write_figure(part.charts, folder / part.stem, part.columns)


def write_figure(charts: Sequence[ChartPart], stem: Path, columns: int = 1) -> None:
    """Write charts as one PNG and one SVG file, in the report's style on every machine.

    Files that already hold these charts are left as they are: the SVG file names what it shows.
    """
    png, svg, shown = Path(f"{stem}.png"), Path(f"{stem}.svg"), _digest(charts, columns)
    if png.is_file() and svg.is_file() and shown in svg.read_text("utf-8")[:METADATA_CHARACTERS]:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    # Not ``savefig``, which draws everything once more to lay it out.
    with figure_style():
        figure = chart_figure(charts, columns)
        figure.set_dpi(PNG_DPI)
        canvas: Any = FigureCanvasAgg(figure)
        with atomic_write(png) as temporary:
            canvas.print_png(temporary, metadata={"Software": None})
        figure.set_layout_engine("none")  # the panels stay where they were laid out above
        about = {"Date": None, "Creator": None, "Description": shown}
        canvas = FigureCanvasSVG(figure)
        with atomic_write(svg) as temporary:
            canvas.print_svg(temporary, metadata=about)


def _digest(charts: Sequence[ChartPart], columns: int) -> str:
    """Return a digest of what decides how a picture looks: charts, code, colours, matplotlib."""
    text = repr((charts, columns, COLOURS, CONTROL_COLOUR, _drawn_by()))
    return f"labkit:{hashlib.sha256(text.encode()).hexdigest()}"


@cache
def _drawn_by() -> tuple[str, bytes]:
    return version("matplotlib"), Path(__file__).read_bytes()


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib to the report's style, regardless of this machine's own settings."""
    import matplotlib as mpl

    settings: Any = {**mpl.rcParamsDefault, "backend": "agg", **RC_PARAMS}
    with mpl.rc_context(settings):
        yield


def chart_figure(parts: Sequence[ChartPart], columns: int = 1) -> Figure:
    """Return a figure with a panel for each chart, and one legend below them."""
    from matplotlib.figure import Figure

    heights = [_height(part.chart) for part in parts]
    lines = [max(heights[i : i + columns]) for i in range(0, len(heights), columns)]
    width = WIDTH if columns == 1 else PANEL_WIDTH * columns
    size = (width, min(sum(lines), MAX_HEIGHT))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(lines), columns, squeeze=False, height_ratios=lines).ravel()
    handles: dict[str, Any] = {}
    for panel, part in zip(panels, parts, strict=False):
        handles |= _draw(panel, part)
        if len(parts) > 1:
            panel.set_title(_plain(part.chart.title), fontsize=10)
    for panel in panels[len(parts) :]:
        panel.set_visible(False)
    if len(handles) > 1:
        widest = max(map(len, handles)) + 6  # characters, with the mark
        per_line = max(1, min(4, len(handles), LEGEND_CHARACTERS // widest))
        names = map(_plain, handles)
        figure.legend(handles.values(), names, loc="outside lower center", ncols=per_line)
    return figure


def _height(chart: Chart) -> float:
    height = len(chart.rows) * chart.row_height if chart.rows else chart.height
    return 0.9 + height / UNITS_PER_INCH


def _draw(panel: Axes, part: ChartPart) -> dict[str, Any]:
    """Draw a chart and return what its legend shows, by name."""
    from matplotlib.lines import Line2D

    chart = part.chart
    handles: dict[str, Any] = {}
    for mark in chart.marks:
        drawn = _draw_mark(panel, mark, chart.log_scale)
        if isinstance(mark, Dots):
            handles.setdefault("published" if mark.style == "published" else mark.arm, drawn)
    for name, style, shape in part.keys:
        colour, opacity, dashes = _style(style)
        width = 6.0 if shape == "bar" else 1.2
        look: dict[str, Any] = {
            "color": colour,
            "alpha": opacity,
            "linestyle": dashes,
            "linewidth": width,
        }
        handles[name] = Line2D([], [], **look)
    handles.pop("", None)
    _draw_axes(panel, chart)
    return handles


def _draw_axes(panel: Axes, chart: Chart) -> None:
    x, y = (_scaled(ends, chart.log_scale) for ends in (chart.x, chart.y))
    if chart.log_scale:
        panel.set_xscale("log")
        panel.set_yscale("log")
    panel.set_xlim(*x)
    panel.set_ylim(*y)
    panel.set_xlabel(_plain(chart.x_label))
    panel.set_ylabel(_plain(chart.y_label))
    if chart.x_ticks is not None:
        panel.set_xticks([at for at, _ in chart.x_ticks], [_plain(t) for _, t in chart.x_ticks])
    if chart.rows:
        count = len(chart.rows)
        panel.set_yticks([count - i - 0.5 for i in range(count)], map(_plain, chart.rows))
        panel.grid(axis="y", visible=False)
    elif not chart.y_ticks:
        panel.set_yticks([])


def _draw_mark(panel: Axes, mark: Mark, log_scale: bool) -> Any:
    from matplotlib.collections import PolyCollection

    match mark:
        case Line() | Dots():
            colour, opacity, dashes = _style(mark.style)
            x, y = zip(*(_scaled(point, log_scale) for point in mark.points), strict=True)
            if isinstance(mark, Line):
                return panel.plot(x, y, color=colour, linestyle=dashes, linewidth=1.2)[0]
            face = "white" if mark.style == "published" else colour
            shape = SHAPES[mark.mark]
            return panel.plot(x, y, shape, color=colour, markersize=5, markerfacecolor=face)[0]
        case Bars():
            colour, opacity, _ = _style(mark.style)
            corners = [[(a, c), (b, c), (b, d), (a, d)] for a, b, c, d in mark.boxes]
            return panel.add_collection(PolyCollection(corners, facecolor=colour, alpha=opacity))
        case Band():
            colour, opacity, _ = _style(mark.style)
            span = panel.axhspan if mark.across else panel.axvspan
            return span(mark.low, mark.high, color=colour, alpha=opacity, linewidth=0)
        case Text():
            at = _scaled((mark.x, mark.y), log_scale)
            return panel.annotate(
                _plain(mark.text), at, (mark.dx, -mark.dy), textcoords="offset points", fontsize=8,
                ha=ALIGNMENTS[mark.anchor], va="center",
            )  # fmt: skip
        case Limit():
            place: Any = ("data", "axes fraction")
            panel.annotate(_plain(mark.name), (mark.x, 1.0), xycoords=place, fontsize=8)
            return panel.axvline(mark.x, color="#777777", linewidth=0.8)


def _plain(text: str) -> str:
    """Return a text that matplotlib shows as it is: two dollar signs would enclose a formula."""
    return text.replace("$", r"\$")


def _scaled(values: Sequence[float], log_scale: bool) -> tuple[float, float]:
    """Return a pair in matplotlib's units: a chart with a log scale holds exponents of ten."""
    first, second = ((10.0**value if log_scale else value) for value in values)
    return first, second


def _style(classes: str) -> tuple[str, float, Any]:
    """Return colour, opacity and dashes of the page's style classes: ``line arm2 dashed``."""
    colour, opacity, dashes = "black", 1.0, "-"
    for word in classes.split():
        number = word.removeprefix("arm").removeprefix("series")
        if number.isdigit():
            colour = COLOURS[int(number)]
        elif word in STYLES:
            colour, opacity = STYLES[word]
        dashes = DASHES.get(word, dashes)
    return colour, opacity, dashes
