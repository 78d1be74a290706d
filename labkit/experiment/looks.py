"""Looks: a sequential study ends at a predeclared look where all is decided, never else.

The looks and the parts of alpha that they spend are fixed before the first run
(:class:`labkit.config.Look`); :mod:`labkit.analysis.statistics.interim_analysis` says why
that is sound.
"""

from __future__ import annotations

from labkit.experiment.cell import Cell
from labkit.records import Record, read_cell, write_json

DECIDED = frozenset({"faster", "slower", "equivalent", "trivial"})


def ends(cell: Cell, blocks: int, records: list[Record]) -> bool:
    """Take the look after ``blocks`` blocks, note it in ``cell.json``, tell if the cell ends.

    A look is taken with exactly its own blocks done; one that was passed before stays as
    it was.
    """
    look = next((look for look in cell.design.looks if look.blocks == blocks), None)
    if look is None or any(record.block >= blocks for record in records):
        return False
    decided = _decided(cell)
    data = read_cell(cell.dir)
    taken = [item for item in data["design"].get("looks_taken", []) if item["blocks"] < blocks]
    taken.append({"blocks": look.blocks, "alpha": look.alpha, "decided": decided})
    if data["design"].get("looks_taken") != taken:
        data["design"]["looks_taken"] = taken
        write_json(cell.dir / "cell.json", data)
    return decided


def ended(cell: Cell) -> bool:
    """Tell whether the cell's last look ended it, from its file."""
    if not (cell.dir / "cell.json").exists():
        return False
    taken = read_cell(cell.dir)["design"].get("looks_taken", [])
    return bool(taken) and bool(taken[-1]["decided"])


def _decided(cell: Cell) -> bool:
    """Tell whether every arm has a verdict in every row of the primary metric."""
    from labkit.analysis.cell_analysis import analyse

    analysis = analyse(cell.dir)
    arms = [arm.name for arm in cell.arms if arm.role == "arm"]
    words = [
        verdicts[arm].word
        for row, verdicts in zip(analysis.rows, analysis.verdicts, strict=True)
        if row.primary and row.skipped is None
        for arm in arms
    ]
    return bool(words) and DECIDED.issuperset(words)
