"""Looks: a sequential study ends at a predeclared look where all is decided, never else.

The looks and the parts of alpha that they spend are fixed before the first run
(:class:`labkit.config.Look`); :mod:`labkit.analysis.statistics.interim_analysis` says why
that is sound. Whether all is decided is for the analysis to say, which lies above: it is
handed down as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labkit.experiment.cell import Cell
from labkit.records import Record, read_cell, write_json

Decided = Callable[[Path], bool]  # of a cell's folder: whether every arm has its verdict


def ends(cell: Cell, blocks: int, records: list[Record], decided: Decided | None) -> bool:
    """Take the look after ``blocks`` blocks, note it in ``cell.json``, tell if the cell ends.

    A look is taken with exactly its own blocks done; one that was passed before stays as
    it was.
    """
    look = next((look for look in cell.design.looks if look.blocks == blocks), None)
    if look is None or any(record.block >= blocks for record in records):
        return False
    if decided is None:
        raise ValueError(f"cell {cell.name}: its design has looks, and nobody to take them")
    found = decided(cell.dir)
    data = read_cell(cell.dir)
    taken = [item for item in data["design"].get("looks_taken", []) if item["blocks"] < blocks]
    taken.append({"blocks": look.blocks, "alpha": look.alpha, "decided": found})
    if data["design"].get("looks_taken") != taken:
        data["design"]["looks_taken"] = taken
        write_json(cell.dir / "cell.json", data)
    return found


def ended(cell: Cell) -> bool:
    """Tell whether the cell's last look ended it, from its file."""
    if not (cell.dir / "cell.json").exists():
        return False
    taken = read_cell(cell.dir)["design"].get("looks_taken", [])
    return bool(taken) and bool(taken[-1]["decided"])
