"""How many blocks of runs, and what is declared before them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from labkit.config.rules import require


class Isolation(Enum):
    """Where a run happens.

    ``process``: in a fresh process of its own. ``in_process``: one fresh process holds
    every arm and alternates them repeat by repeat; kernel workloads only.
    """

    process = "process"
    in_process = "in_process"


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
    ``looks``: where the study may stop because all is decided; the parts of ``alpha``
    that they spend sum to at most ``alpha``. None: it runs all its blocks.
    """

    name: str = "standard"
    blocks: int = 4
    runs_per_block: int = 2
    control: bool = True
    margin_pct: float = 2.0
    alpha: float = 0.05
    isolation: Isolation = Isolation.process
    peek: bool = False
    timeout_s: float = 600.0
    looks: list[Look] = field(default_factory=list)

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
        require(
            self.timeout_s > 0, f"design.timeout_s={self.timeout_s}: allowed are above 0 (seconds)"
        )
        if self.looks:
            self._check_looks()

    def _check_looks(self) -> None:
        at, spent = [look.blocks for look in self.looks], sum(look.alpha for look in self.looks)
        require(
            at[0] >= 1 and at == sorted(set(at)),
            f"design.looks: blocks {at} must be above 0 and grow from look to look",
        )
        require(
            self.blocks in at,
            f"design.blocks={self.blocks}: the last block must be a look; "
            f"design.looks are at {', '.join(map(str, at))}",
        )
        require(
            all(look.alpha > 0 for look in self.looks) and spent <= self.alpha * (1 + 1e-9),
            f"design.looks: every look spends some alpha, all together ({spent:g}) at most "
            f"design.alpha={self.alpha:g}",
        )
        for look in self.looks:
            floor = 2 / math.comb(2 * self.runs_per_block, self.runs_per_block) ** look.blocks
            require(
                floor <= look.alpha,
                f"design.looks: {look.blocks} blocks of {self.runs_per_block} cannot reach "
                f"p = {look.alpha:g} (smallest: {floor:.2g}); look later",
            )
