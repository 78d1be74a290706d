"""Tables in a terminal: no word and no number is ever broken.

A table whose columns have room for their longest words is shown as a table. Otherwise each line is
a record: the first cell, and below it one line per further cell with its heading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

GAP = 2  # characters that rich puts between columns, and in all at both ends
INDENT = "  "  # of the cells of a record


@dataclass(frozen=True)
class TerminalColumn:
    """A column: its heading in a table, its heading in a record, and its kind.

    Cells of a ``numeric`` column are right-aligned and never wrapped. Others wrap between words.
    """

    heading: str
    name: str
    numeric: bool

    def min_width(self, cells: Sequence[Text]) -> int:
        """Return the width of the longest word or, in a numeric column, of the longest cell."""
        parts = self.heading.split("\n")
        for cell in cells:
            parts += cell.plain.split("\n") if self.numeric else cell.plain.split()
        return max(map(_width, parts), default=0)

    def max_width(self, cells: Sequence[Text]) -> int:
        """Return the width in which no cell wraps."""
        lines = [line for cell in cells for line in cell.plain.split("\n")]
        return max(map(_width, [*self.heading.split("\n"), *lines]), default=0)


def terminal_table(
    columns: Sequence[TerminalColumn], rows: Sequence[Sequence[Text]], width: int
) -> RenderableType:
    """Return a table for a terminal of ``width`` characters, or records if it has no room.

    ``rows``: the cells of each line, ``[lines][columns]``. An empty first cell stands for the one
    above it.
    """
    cells = [[row[i] for row in rows] for i in range(len(columns))]
    widths = column_widths(
        [column.min_width(own) for column, own in zip(columns, cells, strict=True)],
        [column.max_width(own) for column, own in zip(columns, cells, strict=True)],
        width - GAP * len(columns),
    )
    if widths is None:
        return _records(columns, rows)
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column, characters in zip(columns, widths, strict=True):
        justify: Literal["right", "left"] = "right" if column.numeric else "left"
        table.add_column(
            Text(column.heading), justify=justify, no_wrap=column.numeric, width=characters
        )
    for row in rows:
        table.add_row(*row)
    return table


def column_widths(smallest: Sequence[int], largest: Sequence[int], room: int) -> list[int] | None:
    """Return the widths of columns that share ``room`` characters; None if it is too small.

    Every column gets its smallest width. The rest is divided equally among those that can use it.
    """
    left = room - sum(smallest)
    if left < 0:
        return None
    widths = list(smallest)
    order = sorted(range(len(widths)), key=lambda i: largest[i] - smallest[i])
    for place, i in enumerate(order):
        extra = min(largest[i] - smallest[i], left // (len(order) - place))
        widths[i] += extra
        left -= extra
    return widths


def _records(columns: Sequence[TerminalColumn], rows: Sequence[Sequence[Text]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines: list[Text] = []
    for first, *others in rows:
        if first.plain:
            lines += [Text(), Text.assemble((first.plain, "bold"))]
        for column, cell in zip(columns[1:], others, strict=True):
            if cell.plain:
                lines.append(Text.assemble(f"{INDENT}{column.name}: ", cell))
    return Group(*lines, Text())


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
