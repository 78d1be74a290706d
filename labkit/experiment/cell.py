"""A cell: one question on one workload, and its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.config import Design, Isolation, Look
from labkit.experiment.permuted_blocks import Run, schedule
from labkit.records import Arm


@dataclass(frozen=True)
class CellPaths:
    """Where the files of the cell in folder ``dir`` lie.

    A worker writes into ``runs/pending``; the runner checks what it finds there and
    publishes it into ``runs``. What is set aside goes to ``runs/abandoned``.
    """

    dir: Path

    @property
    def arms(self) -> Path:
        """The folder of the arms."""
        return self.dir / "arms"

    @property
    def runs(self) -> Path:
        """The folder of the records and logs."""
        return self.dir / "runs"

    @property
    def pending(self) -> Path:
        """The folder of the records that are not published yet."""
        return self.runs / "pending"

    @property
    def abandoned(self) -> Path:
        """The folder of what was set aside."""
        return self.runs / "abandoned"

    def arm(self, name: str) -> Path:
        """Return an arm's file."""
        return self.arms / f"{name}.json"

    def record(self, run: Run) -> Path:
        """Return a run's record."""
        return self.runs / f"{run.name}.json"

    def pending_record(self, run: Run) -> Path:
        """Return a run's record as the worker writes it."""
        return self.pending / f"{run.name}.json"

    def log(self, run: Run) -> Path:
        """Return a run's log."""
        return self.runs / f"{run.name}.log"

    def move_to_abandoned(self, path: Path) -> Path:
        """Move a file to ``runs/abandoned`` under a name that nothing there has."""
        self.abandoned.mkdir(parents=True, exist_ok=True)
        target, number = self.abandoned / path.name, 1
        while target.exists():
            target = self.abandoned / f"{path.stem}~{number}{path.suffix}"
            number += 1
        return path.rename(target)


@dataclass(frozen=True)
class Cell:
    """One cell, ready to run: its folder, its arms and its design.

    ``arms``: the baseline first, the control (if any) last. ``published``: numbers of
    others, shown beside ours. ``scale``: of which its experiment has several; None: it has none.
    ``design`` is as it is run: see :func:`normalized_design`.
    """

    dir: Path
    name: str
    arms: tuple[Arm, ...]
    design: Design
    seed: int
    question: str = ""
    published: Any = None
    scale: str | None = None

    def __post_init__(self) -> None:
        """Check that there is one baseline and that no two arms share a name."""
        roles = [arm.role for arm in self.arms]
        if roles.count("baseline") != 1 or roles.count("control") > 1:
            raise ValueError(f"cell {self.name}: exactly one baseline, at most one control")
        if self.design.isolation is Isolation.auto:
            raise ValueError(f"cell {self.name}: its isolation is not decided")
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError(f"cell {self.name}: two arms have the same name")
        object.__setattr__(self, "design", normalized_design(self.design))

    @property
    def paths(self) -> CellPaths:
        """Where its files lie."""
        return CellPaths(self.dir)

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
    def stopping_points(self) -> tuple[int, ...]:
        """After how many blocks the cell may end: at its looks, or when all are done."""
        looks = tuple(look.blocks for look in self.design.looks)
        return tuple(at for at in looks if at <= self.design.blocks) or (self.design.blocks,)


def normalized_design(design: Design) -> Design:
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
