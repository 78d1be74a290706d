"""The colour and mark of each arm, on the HTML page and in pictures.

Colour-blind readers can tell the colours apart (M. Okabe and K. Ito, 2008). No two of the first
``NUM_STYLES`` arms or curves share both colour and mark, or both colour and dashes.
"""

from __future__ import annotations

from labkit.analysis.document import svg_elements
from labkit.analysis.model.cell_model import Cell

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
CONTROL_COLOUR = "#888888"
DASHES = ("", " dashed", " dotted", " dashdot")  # classes of the style sheet
NUM_STYLES = len(COLOURS) * len(svg_elements.MARKS)


def mark_index(index: int) -> int:
    """Return the mark of the arm or curve with this index; the colour is ``index % 6``."""
    return (index + index // len(COLOURS)) % len(svg_elements.MARKS)


def page_style_of(index: int) -> tuple[str, str]:
    """Return the style class and mark, on the HTML page, of the arm or curve with this index."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return f"arm{index % len(COLOURS)}{dashes}", svg_elements.MARKS[mark_index(index)]


def arm_classes(cell: Cell) -> dict[str, tuple[str, str]]:
    """Return the style class and mark of every arm. The control has grey crosses."""
    styles = {name: page_style_of(index) for index, name in enumerate(cell.real_arms)}
    return styles if cell.control is None else {**styles, cell.control: ("control", "cross")}
