"""``cell.json`` as the experiment keeps it: what the cell is bound to, and the looks taken.

The analysis adds its results to the same file (:mod:`labkit.analysis`). A sequential study
ends at a predeclared look where all is decided, never else: the looks and the parts of
alpha that they spend are fixed before the first run (:class:`labkit.config.Look`), and
:mod:`labkit.analysis.statistics.interim_analysis` says why that is sound. Whether all is
decided is for the analysis to say, which lies above: it is handed down as a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, to_plain
from labkit.experiment.cell import Cell
from labkit.records import (
    SCHEMA_VERSION,
    Record,
    RecordError,
    read_arms,
    read_cell,
    write_json,
)

# Of the design, what a cell's folder is bound to; blocks may grow.
BOUND = ("isolation", "seed", "runs_per_block", "control", "alpha", "margin_pct", "looks")

AllDecided = Callable[[Path], bool]  # of a cell's folder: whether every arm has its verdict


def _exists(cell: Cell) -> bool:
    return (cell.dir / "cell.json").exists()


def _kept_design(cell: Cell) -> Mapping[str, Any]:
    design: Mapping[str, Any] = read_cell(cell.dir)["design"] if _exists(cell) else {}
    return design


def new_manifest(cell: Cell, blocks: int) -> dict[str, Any]:
    """Return ``cell.json`` as it is before the analysis: contract keys, nothing measured.

    ``blocks``: how many are asked for by now; with looks those up to the next one.
    """
    unclaimed = {"status": "unclaimed", "reasons": []}
    return {
        "schema_version": SCHEMA_VERSION,
        "cell": cell.name,
        "question": cell.question,
        "scale": cell.scale,
        "arms": [
            {"name": a.name, "role": a.role, "overrides": dict(a.overrides), "counters": {}}
            for a in cell.arms
        ],
        "design": {
            "seed": cell.seed,
            "blocks": blocks,
            "runs_per_block": cell.design.runs_per_block,
            "control": cell.design.control,
            "order": "permuted_blocks",
            "isolation": cell.design.isolation.value,
            "across_hosts": cell.design.across_hosts,
            "looks": [to_plain(look) for look in cell.design.looks],
            "alpha": cell.design.alpha,
            "margin_pct": cell.design.margin_pct,
        },
        "identity": cell.identity,
        "gates": {name: dict(unclaimed) for name in ("healthy", "engaged", "identical")},
        "rows": [],
        "failures": [],
        "environment": {},
        "published": cell.published,
    }


def refuse_changes(cell: Cell) -> None:
    """Refuse a cell whose folder holds records of another question.

    Raises
    ------
    ConfigError
        One line with the first difference. Only ``design.blocks`` may grow.
    """
    if not (cell.dir / "arms").is_dir() and not _exists(cell):
        return
    try:
        difference = _difference(cell)
    except RecordError as error:
        raise ConfigError(f"{error}; choose another out=") from None
    if difference:
        raise ConfigError(f"{cell.dir}: {difference}; choose another out=")


def _difference(cell: Cell) -> str | None:
    kept = {arm.name: arm for arm in read_arms(cell.dir)}
    ours = {arm.name: arm for arm in cell.arms}
    if not _exists(cell):  # killed before its first file was whole
        ours = {name: arm for name, arm in ours.items() if name in kept}
    for name in sorted(kept.keys() | ours.keys()):
        if name not in ours:
            return f"arm {name} is there, and now is not an arm"
        if name not in kept:
            return f"arm {name} is new"
        change = difference(kept[name].to_json(), ours[name].to_json())
        if change:
            return f"arm {name}: {change}"
    return _design_difference(cell)


def _design_difference(cell: Cell) -> str | None:
    kept, ours = _kept_design(cell), new_manifest(cell, cell.design.blocks)["design"]
    for key in BOUND:
        if key in kept and not (_same_looks if key == "looks" else eq)(kept[key], ours[key]):
            name = "seed" if key == "seed" else f"design.{key}"
            return f"{name} was {kept[key]}, now {ours[key]}"
    if kept.get("blocks", 0) > ours["blocks"]:
        return f"design.blocks was {kept['blocks']}, now {ours['blocks']}: blocks may only grow"
    return None


def _same_looks(kept: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> bool:
    """Compare looks. The last one moves with the blocks that are asked for, where they grow."""
    ends = [looks[-1]["blocks"] if looks else math.inf for looks in (kept, ours)]
    if ends[0] == ends[1]:
        return list(kept) == list(ours)
    early = [[look for look in looks if look["blocks"] < min(ends)] for looks in (kept, ours)]
    return early[0] == early[1]


def difference(kept: Any, ours: Any, where: str = "") -> str | None:
    """Say the first difference of two JSON values: ``config.engine.blas was x, now y``."""
    if isinstance(kept, Mapping) and isinstance(ours, Mapping):
        for key in [*kept, *(key for key in ours if key not in kept)]:
            path = f"{where}.{key}" if where else str(key)
            if key not in ours:
                return f"{path} was {kept[key]}, now is not set"
            if key not in kept:
                return f"{path} was not set, now {ours[key]}"
            change = difference(kept[key], ours[key], path)
            if change:
                return change
        return None
    if isinstance(kept, list) and isinstance(ours, list | tuple) and len(kept) == len(ours):
        pairs = enumerate(zip(kept, ours, strict=True))
        return next(filter(None, (difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)), None)
    return None if kept == ours else f"{where} was {kept}, now {ours}"


def write_manifest(cell: Cell, blocks: int) -> None:
    """Write ``arms/*.json`` and ``cell.json`` (both only where they differ or are absent).

    ``blocks``: as in :func:`new_manifest`; more that were asked for before stay.

    Raises
    ------
    OSError
        The folder can't be written.
    """
    paths = cell.paths
    for folder in (paths.arms, paths.pending):
        folder.mkdir(parents=True, exist_ok=True)
    for arm in cell.arms:
        if not paths.arm(arm.name).exists():
            write_json(paths.arm(arm.name), arm.to_json())
    kept = _kept_design(cell)
    hosts = kept.get("across_hosts", False) != cell.design.across_hosts
    if kept.get("blocks", 0) < blocks or hosts:
        fresh = new_manifest(cell, max(blocks, kept.get("blocks", 0)))
        fresh["design"] |= {key: kept[key] for key in ("looks_taken",) if key in kept}
        fresh["design"]["shown"] = shown(cell)
        write_json(cell.dir / "cell.json", fresh)


def shown(cell: Cell) -> list[int]:
    """Return after how many blocks results of the cell were shown, from its file.

    The analysis notes it in ``cell.json`` when it writes a finished cell's results there.
    One that has rows and no note was written before there was one.
    """
    if not _exists(cell):
        return []
    kept = read_cell(cell.dir)
    unnoted = [kept["design"]["blocks"]] if kept["rows"] else []
    return [int(blocks) for blocks in kept["design"].get("shown", unnoted)]


def exploratory_warning(cell: Cell) -> str | None:
    """Say that the cell asks for blocks beyond those whose results were shown, or None."""
    looks = [look.blocks for look in cell.design.looks]
    before = [n for n in shown(cell) if n < cell.design.blocks and n not in looks]
    if not before:
        return None
    return (
        f"results were shown after {before[0]} blocks, and now {cell.design.blocks} are asked "
        "for: what follows is exploratory and claims nothing; a new study with design.looks at "
        f"{before[0]} and {cell.design.blocks} blocks could"
    )


def take_interim_look(
    cell: Cell, blocks: int, records: list[Record], decided: AllDecided | None
) -> bool:
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


def ended_at_look(cell: Cell) -> bool:
    """Tell whether the cell's last look ended it, from its file."""
    taken = _kept_design(cell).get("looks_taken", [])
    return bool(taken) and bool(taken[-1]["decided"])
