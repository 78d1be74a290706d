"""How many blocks of runs, and what is declared before them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, option, require


class Isolation(Enum):
    """Where a run happens.

    process: in a fresh process of its own. in_process: one fresh process holds every arm, and
    they take turns. auto: in_process wherever the arms can share one.
    """

    auto = "auto"
    in_process = "in_process"
    process = "process"


@dataclass
class Look(Group, place="design.looks"):
    """A predeclared look at the results."""

    blocks: int = option(0, "After so many blocks.")
    alpha: float = option(0.0, "What it may spend of design.alpha.")


@dataclass
class Design(Group, place="design"):
    """How many blocks of runs, and what is declared before them."""

    name: str = option("standard", "What reports call it.")
    blocks: int = option(
        4,
        "Random permutations of runs that hold every arm equally often. May grow in a folder; "
        "once results were shown, only from look to look, or the study is exploratory and claims "
        "nothing (docs/statistics.md).",
        least=1,
        most=1000,
        unit="blocks",
    )
    runs_per_block: int = option(2, "Runs of each arm in a block.", words=(1, 2))
    control: bool = option(True, "The A/A arm: the baseline once more, under another name.")
    margin_pct: float = option(
        2.0,
        "Differences below it are called trivial or equivalent.",
        above=0,
        most=50,
        unit="percent",
    )
    alpha: float = option(
        0.05,
        "How often a study may say something wrong anywhere.",
        above=0,
        most=0.5,
        unit="probability",
    )
    isolation: Isolation = option(Isolation.auto)
    timeout_s: float = option(600.0, "A run that takes longer is killed.", above=0, unit="seconds")
    looks: list[Look] = option(
        factory=list,
        meaning="Where the study stops if all is decided; what those before the last block leave "
        "of alpha is spent after it.",
    )
    confirm: int = option(
        0,
        "Where arms take turns, so many blocks of separate processes follow, to see whether they "
        "agree.",
        least=0,
        most=1000,
        unit="blocks",
    )

    across_hosts: bool = option(
        False,
        "The host is a blocking factor: a cell's blocks may be of several hosts, each block of "
        "one, and cells of several machines may be compared with each other.",
    )

    def __post_init__(self) -> None:
        """Check that the looks spend no more than alpha."""
        super().__post_init__()
        if self.looks:
            self._check_looks()

    @property
    def all_looks(self) -> list[Look]:
        """The looks there will be: those that are declared, and one at the last block.

        Where that one is not declared it spends what the looks before it leave of alpha,
        and the looks after it are none. Empty: the study is looked at once, at its end.
        """
        if any(look.blocks == self.blocks for look in self.looks):
            return self.looks
        early = [look for look in self.looks if look.blocks < self.blocks]
        left = self.alpha - sum(look.alpha for look in early)
        return [*early, Look(self.blocks, round(left, 12))] if early else []

    def _check_looks(self) -> None:
        at = [look.blocks for look in self.looks]
        require(
            at[0] >= 1 and at == sorted(set(at)),
            f"design.looks: blocks {at} must be above 0 and grow from look to look",
        )
        spent = sum(look.alpha for look in self.all_looks)
        require(
            all(look.alpha > 0 for look in [*self.looks, *self.all_looks])
            and spent <= self.alpha * (1 + 1e-9),
            "design.looks: every look spends some alpha, and so does the last block; all "
            f"together at most design.alpha={self.alpha:g}",
        )
        for look in self.all_looks:
            floor = 2 / math.comb(2 * self.runs_per_block, self.runs_per_block) ** look.blocks
            require(
                floor <= look.alpha,
                f"design.looks: {look.blocks} blocks of {self.runs_per_block} cannot reach "
                f"p = {look.alpha:g} (smallest: {floor:.2g}); look later, or set design.looks=[]",
            )
