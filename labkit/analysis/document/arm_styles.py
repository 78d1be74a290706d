"""The colour and mark of each arm, on the HTML page and in matplotlib figures.

Colour-blind readers can tell the colours apart (M. Okabe and K. Ito, 2008). No two of the first
``NUM_STYLES`` arms or curves share both colour and mark, or both colour and dashes. The same
records give the same pictures byte for byte, because pictures hold no dates and have fixed ids and
sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.document import svg_elements
from labkit.analysis.model.cell_model import Cell
from labkit.records.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
CONTROL_COLOUR = "#888888"
MARKS = ("o", "s", "^", "D")  # in the order of svg_elements.MARKS
DASHES = ("", " dashed", " dotted", " dashdot")  # classes of the style sheet
NUM_STYLES = len(COLOURS) * len(MARKS)
RC_PARAMS: Mapping[str, Any] = {
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


def mark_index(index: int) -> int:
    """Return the mark of the arm or curve with this index; the colour is ``index % 6``."""
    return (index + index // len(COLOURS)) % len(MARKS)


def figure_style_of(index: int) -> tuple[str, str]:
    """Return the matplotlib colour and mark of the arm or curve with this index."""
    return COLOURS[index % len(COLOURS)], MARKS[mark_index(index)]


def page_style_of(index: int) -> tuple[str, str]:
    """Return the style class and mark, on the HTML page, of the arm or curve with this index."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return f"arm{index % len(COLOURS)}{dashes}", svg_elements.MARKS[mark_index(index)]


def arm_styles(cell: Cell) -> dict[str, tuple[str, str]]:
    """Return the matplotlib colour and mark of every arm. The control is grey."""
    return _by_arm(cell, figure_style_of, (CONTROL_COLOUR, "x"))


def arm_classes(cell: Cell) -> dict[str, tuple[str, str]]:
    """Return the style class and mark of every arm on the HTML page. The control: grey crosses."""
    return _by_arm(cell, page_style_of, ("control", "cross"))


def _by_arm(
    cell: Cell, style_of: Callable[[int], tuple[str, str]], of_control: tuple[str, str]
) -> dict[str, tuple[str, str]]:
    styles = {name: style_of(index) for index, name in enumerate(cell.real_arms)}
    control = cell.control
    return styles if control is None else {**styles, control: of_control}


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib to the report's style, regardless of this machine's own settings."""
    import matplotlib as mpl

    settings: Any = {**mpl.rcParamsDefault, "backend": "agg", **RC_PARAMS}
    with mpl.rc_context(settings):
        yield


def save_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as PNG and SVG, without dates or versions."""
    with atomic_write(Path(f"{stem}.png")) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})
    with atomic_write(Path(f"{stem}.svg")) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
