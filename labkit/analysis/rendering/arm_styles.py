"""The colour and mark of each arm, on the HTML page and in matplotlib figures.

Colour-blind readers can tell the colours apart (M. Okabe and K. Ito, 2008), and the marks differ
too. The same records give the same pictures byte for byte, because pictures hold no dates and have
fixed ids and sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.rendering import svg_elements
from labkit.analysis.verdict_sentences import control_name, real_arms
from labkit.records.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
CONTROL_COLOUR = "#888888"
MARKS = ("o", "s", "^", "D", "v")  # 5 marks and 6 colours: 30 arms differ
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


def arm_styles(cell: Json) -> dict[str, tuple[str, str]]:
    """Return the matplotlib colour and mark of every arm. The control is grey."""
    real, control = real_arms(cell), control_name(cell)
    styles = {
        name: (COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]) for i, name in enumerate(real)
    }
    return styles if control is None else {**styles, control: (CONTROL_COLOUR, "x")}


def arm_classes(cell: Json) -> dict[str, tuple[str, str]]:
    """Return the style class and mark of every arm on the HTML page. The control has grey crosses.

    There are six colours. The lines of arms beyond the sixth are dashed.
    """
    real, control = real_arms(cell), control_name(cell)
    styles = {
        name: (
            f"arm{i % 6}{' dashed' if i >= 6 else ''}",
            svg_elements.MARKS[i % len(svg_elements.MARKS)],
        )
        for i, name in enumerate(real)
    }
    return styles if control is None else {**styles, control: ("control", "cross")}


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
