"""A cell: one question on one workload, its folder, and what may not change in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, Design, Isolation, Look, to_plain
from labkit.experiment.blocks import Run, schedule
from labkit.records import SCHEMA_VERSION, Arm, RecordError, read_arms, read_cell, write_json

# Of the design, what a cell's folder is bound to; blocks may grow.
BOUND = ("isolation", "seed", "runs_per_block", "control", "alpha", "margin_pct", "looks")


@dataclass(frozen=True)
class Cell:
    """One cell, ready to run: its folder, its arms and its design.

    ``arms``: the baseline first, the control (if any) last. ``published``: numbers of
    others, shown beside ours. ``design`` is as it is run: see :func:`by_process`.
    """

    dir: Path
    name: str
    arms: tuple[Arm, ...]
    design: Design
    seed: int
    question: str = ""
    published: Any = None

    def __post_init__(self) -> None:
        """Check that there is one baseline and that no two arms share a name."""
        roles = [arm.role for arm in self.arms]
        if roles.count("baseline") != 1 or roles.count("control") > 1:
            raise ValueError(f"cell {self.name}: exactly one baseline, at most one control")
        if self.design.isolation is Isolation.auto:
            raise ValueError(f"cell {self.name}: its isolation is not decided")
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError(f"cell {self.name}: two arms have the same name")
        object.__setattr__(self, "design", by_process(self.design))

    @property
    def identity(self) -> str:
        """What is claimed about the arms' outputs."""
        return self.arms[0].identity

    def arm(self, name: str) -> Arm:
        """Return the arm of that name; raises ``KeyError``."""
        return {arm.name: arm for arm in self.arms}[name]

    def schedule(self) -> list[Run]:
        """Return all runs of the cell in order."""
        names = [arm.name for arm in self.arms]
        return schedule(names, self.design.blocks, self.design.runs_per_block, self.seed)

    @property
    def stops(self) -> tuple[int, ...]:
        """After how many blocks the cell may end: at its looks, or when all are done."""
        looks = tuple(look.blocks for look in self.design.looks)
        return tuple(at for at in looks if at <= self.design.blocks) or (self.design.blocks,)


def by_process(design: Design) -> Design:
    """Return the design as it is run, its last look said; a process of turns is a block.

    What happens to a process as a whole (where its code and memory lie) happens to both
    runs of an arm in it, so two runs in one process are not two: the process is the unit,
    and 4 blocks of 2 are 8 blocks of 1.
    """
    runs, design = design.runs_per_block, replace(design, looks=design.all_looks)
    if design.isolation is Isolation.process or runs == 1:
        return design
    looks = [Look(look.blocks * runs, look.alpha) for look in design.looks]
    return replace(design, blocks=design.blocks * runs, runs_per_block=1, looks=looks)


@dataclass(frozen=True)
class Paths:
    """Where a cell's files lie.

    A worker writes into ``runs/pending``; the runner checks what it finds there and
    publishes it into ``runs``. What is set aside goes to ``runs/abandoned``.
    """

    dir: Path
    arms: Path = field(init=False)
    runs: Path = field(init=False)
    pending: Path = field(init=False)
    abandoned: Path = field(init=False)

    def __post_init__(self) -> None:
        """Derive the folders."""
        runs = self.dir / "runs"
        for name, path in (
            ("arms", self.dir / "arms"),
            ("runs", runs),
            ("pending", runs / "pending"),
            ("abandoned", runs / "abandoned"),
        ):
            object.__setattr__(self, name, path)

    def arm(self, name: str) -> Path:
        """Return an arm's file."""
        return self.arms / f"{name}.json"

    def record(self, run: Run) -> Path:
        """Return a run's record."""
        return self.runs / f"{run.name}.json"

    def log(self, run: Run) -> Path:
        """Return a run's log."""
        return self.runs / f"{run.name}.log"


def facts(cell: Cell, blocks: int) -> dict[str, Any]:
    """Return ``cell.json`` as it is before the analysis: contract keys, nothing measured.

    ``blocks``: how many are asked for by now; with looks those up to the next one.
    """
    unclaimed = {"status": "unclaimed", "reasons": []}
    return {
        "schema_version": SCHEMA_VERSION,
        "cell": cell.name,
        "question": cell.question,
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
    if not (cell.dir / "arms").is_dir() and not (cell.dir / "cell.json").exists():
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
    if not (cell.dir / "cell.json").exists():  # killed before its first file was whole
        ours = {name: arm for name, arm in ours.items() if name in kept}
    for name in sorted(kept.keys() | ours.keys()):
        if name not in ours:
            return f"arm {name} is there, and now is not an arm"
        if name not in kept:
            return f"arm {name} is new"
        change = difference(kept[name].to_json(), ours[name].to_json())
        if change:
            return f"arm {name}: {change}"
    return _design_difference(cell) if (cell.dir / "cell.json").exists() else None


def _design_difference(cell: Cell) -> str | None:
    kept, ours = read_cell(cell.dir)["design"], facts(cell, cell.design.blocks)["design"]
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


def write_facts(cell: Cell, blocks: int) -> None:
    """Write ``arms/*.json`` and ``cell.json`` (both only where they differ or are absent).

    ``blocks``: as in :func:`facts`; more that were asked for before stay.

    Raises
    ------
    OSError
        The folder can't be written.
    """
    paths = Paths(cell.dir)
    for folder in (paths.arms, paths.pending):
        folder.mkdir(parents=True, exist_ok=True)
    for arm in cell.arms:
        if not paths.arm(arm.name).exists():
            write_json(paths.arm(arm.name), arm.to_json())
    kept = read_cell(cell.dir)["design"] if (cell.dir / "cell.json").exists() else {}
    if kept.get("blocks", 0) < blocks:
        fresh = facts(cell, blocks)
        fresh["design"] |= {key: kept[key] for key in ("looks_taken",) if key in kept}
        fresh["design"]["shown"] = shown(cell)
        write_json(cell.dir / "cell.json", fresh)


def shown(cell: Cell) -> list[int]:
    """Return after how many blocks results of the cell were shown, from its file.

    The analysis notes it in ``cell.json`` when it writes a finished cell's results there.
    One that has rows and no note was written before there was one.
    """
    if not (cell.dir / "cell.json").exists():
        return []
    kept = read_cell(cell.dir)
    unnoted = [kept["design"]["blocks"]] if kept["rows"] else []
    return [int(blocks) for blocks in kept["design"].get("shown", unnoted)]


def grown(cell: Cell) -> str | None:
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
