"""How many blocks of runs, and what is declared before them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from labkit.config.rules import require


class Isolation(Enum):
    """Where a run happens.

    ``process``: in a fresh process of its own. ``in_process``: one fresh process holds
    every arm, and they take turns. ``auto``: in_process wherever the arms can share one.
    """

    auto = "auto"
    in_process = "in_process"
    process = "process"


@dataclass
class Look:
    """A predeclared look at the results after ``blocks`` blocks; it may spend ``alpha``."""

    blocks: int = 0
    alpha: float = 0.0


@dataclass
class Design:
    """How many blocks of runs, and what is declared before them.

    ``blocks`` may grow in a folder; once results were shown, only from look to look, or the
    study is exploratory and claims nothing (docs/statistics.md).
    ``margin_pct``: differences below it (percent) are called trivial or equivalent.
    ``timeout_s``: a run that takes longer (seconds) is killed.
    ``looks``: where the study stops if all is decided; what those before the last block
    leave of ``alpha`` is spent after it. ``confirm``: where arms take turns, so
    many blocks of separate processes follow, to see whether they agree.
    """

    name: str = "standard"
    blocks: int = 4
    runs_per_block: int = 2
    control: bool = True
    margin_pct: float = 2.0
    alpha: float = 0.05
    isolation: Isolation = Isolation.auto
    timeout_s: float = 600.0
    looks: list[Look] = field(default_factory=list)
    confirm: int = 0

    def __post_init__(self) -> None:
        """Check the ranges, and that the looks spend no more than alpha."""
        require(1 <= self.blocks <= 1000, f"design.blocks={self.blocks}: allowed are 1 to 1000")
        require(
            self.runs_per_block in (1, 2),
            f"design.runs_per_block={self.runs_per_block}: allowed are 1 and 2",
        )
        require(
            0 < self.margin_pct <= 50,
            f"design.margin_pct={self.margin_pct}: allowed are above 0, at most 50 (percent)",
        )
        require(0 < self.alpha <= 0.5, f"design.alpha={self.alpha}: allowed are above 0, to 0.5")
        require(0 <= self.confirm <= 1000, f"design.confirm={self.confirm}: allowed are 0 to 1000")
        require(
            self.timeout_s > 0, f"design.timeout_s={self.timeout_s}: allowed are above 0 (seconds)"
        )
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
