"""Experimental design: blocks, alpha, interim looks and isolation of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, option, require

MAX_ENUMERATED, DRAWN = 300_000, 100_000  # relabellings; of more than the first, a test draws


class Isolation(Enum):
    """Isolation of runs.

    process: each run in a fresh process, one after the other. in_process: the arms of a block take
    turns in one fresh process. live: each arm of a block has a fresh process; these processes are
    alive at the same time and take turns.
    auto: in_process if the arms can share a process, else live if that is possible, else process.
    """

    auto = "auto"
    in_process = "in_process"
    live = "live"
    process = "process"

    @property
    def takes_turns(self) -> bool:
        """Whether the arms of a block take turns, so that each round of turns can be compared."""
        return self in (Isolation.in_process, Isolation.live)


@dataclass
class PlannedLook(Group, place="design.looks"):
    """An interim analysis of the results, declared before the first run."""

    blocks: int = option(0, "Number of blocks after which the look happens.")
    alpha: float = option(0.0, "Part of design.alpha that the look spends.")


@dataclass
class Design(Group, place="design"):
    """Experimental design, declared before the first run."""

    name: str = option("standard", "Name in reports.")
    time: float | None = option(
        None,
        "Time that a cell may take, such as 90s or 10m: for measuring and for starting processes, "
        "not for preparing arms the first time (docs/statistical-methods.md).",
        ge=1,
        le=604_800,
        unit="seconds",
        null_means="what design.blocks and the workload need",
    )
    blocks: int = option(
        4,
        "Blocks: random permutations of runs with every arm equally often. 0: as many as fit into "
        "design.time. A resumed study may "
        "have more blocks, but once results have been shown, blocks beyond the next look make it "
        "exploratory: it then claims nothing (docs/statistics.md).",
        ge=0,
        le=1000,
        unit="blocks",
    )
    runs_per_block: int = option(
        1,
        "Runs per arm and block; 2 only with a process per run, because arms that take turns run "
        "once per block.",
        choices=(1, 2),
    )
    control: bool = option(True, "Add an A/A arm: the baseline again, under another name.")
    margin_pct: float = option(
        2.0,
        "Equivalence margin: smaller differences are called trivial or equivalent.",
        gt=0,
        le=50,
        unit="percent",
    )
    alpha: float = option(
        0.05, "Family-wise error rate of the whole study.", gt=0, le=0.5, unit="probability"
    )
    isolation: Isolation = option(Isolation.auto)
    timeout_s: float = option(
        600.0,
        "Timeout of a run, which is killed when it takes longer; a server has engine.server."
        "start_timeout_s more to start.",
        gt=0,
        unit="seconds",
    )
    looks: list[PlannedLook] = option(
        factory=list,
        meaning="Interim looks, at which the study stops if everything is decided; the last block "
        "spends the alpha that they leave, unless it has a look of its own.",
    )
    eliminate: bool = option(
        False,
        "At each look, drop every setting of a sweep that is significantly worse than another. The "
        "baseline and the control stay (docs/sweeps.md).",
    )
    confirm: int = option(
        0,
        "Additional blocks with a process per run that check the results of in_process runs.",
        ge=0,
        le=1000,
        unit="blocks",
    )

    across_hosts: bool = option(
        False,
        "Make the host a blocking factor: blocks of a cell may come from several hosts, each "
        "block from one, and cells of different machines may be compared.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.looks) or not self.eliminate,
            "design.eliminate=true: settings are dropped at looks, and none comes before the last "
            "block; set design.looks or design=search, or more design.blocks",
        )
        require(
            self.blocks > 0 or (self.time is not None and not self.looks),
            "design.blocks=0: the blocks follow from design.time, and so do the looks; set "
            "design.time and leave design.looks=[], or set design.blocks",
        )
        if self.looks:
            self._check_looks()

    @property
    def all_looks(self) -> list[PlannedLook]:
        """The interim looks and the final look, which is after the last block.

        If the final look is not declared, it spends the alpha that the earlier looks leave, and
        declared looks after the last block are dropped. If it is, they stay as declared, for the
        study may grow to them. The list is empty if no interim look remains.
        """
        if any(look.blocks == self.blocks for look in self.looks):
            return self.looks
        early = [look for look in self.looks if look.blocks < self.blocks]
        left = self.alpha - sum(look.alpha for look in early)
        return [*early, PlannedLook(self.blocks, round(left, 12))] if early else []

    def smallest_p(self, blocks: int) -> float:
        """Return the smallest two-sided p of one arm that ``blocks`` blocks can reach.

        It is larger where relabellings are drawn than with the most blocks that list them all.
        """
        possible = math.comb(2 * self.runs_per_block, self.runs_per_block) ** blocks
        return 2 / (possible if possible <= MAX_ENUMERATED else DRAWN)

    def _check_looks(self) -> None:
        look_blocks = [look.blocks for look in self.looks]
        require(
            look_blocks[0] >= 1 and look_blocks == sorted(set(look_blocks)),
            f"design.looks: the blocks ({', '.join(map(str, look_blocks))}) must be above 0 and "
            "increase from look to look",
        )
        spent = sum(look.alpha for look in self.all_looks)
        require(
            all(look.alpha > 0 for look in [*self.looks, *self.all_looks])
            and spent <= self.alpha * (1 + 1e-9),
            "design.looks: every look and the last block must spend some alpha, in total at most "
            f"design.alpha={self.alpha:g}",
        )
        for look in self.all_looks:
            floor = self.smallest_p(look.blocks)
            require(
                floor <= look.alpha,
                f"design.looks: a look after {look.blocks} block{'s' * (look.blocks != 1)} of "
                f"{self.runs_per_block} cannot reach p = {look.alpha:g} (smallest: {floor:.2g}); "
                "set more blocks for it, or design.looks=[]",
            )
