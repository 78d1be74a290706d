"""A study: the cells of one command."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.model.cell_model import Cell


@dataclass(frozen=True)
class Study:
    """A study's name and its cells, sorted by name."""

    name: str
    cells: tuple[Cell, ...]
