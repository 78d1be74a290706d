"""The order of runs: permuted blocks from a stored seed.

Each block is one uniformly random permutation of every arm, ``runs_per_block`` times.
The analysis relabels within blocks, which is exactly what is drawn here. (Fixed orders
such as ABAB are not valid under drift; see the permuted-block design of clinical trials.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.records import run_name


@dataclass(frozen=True, slots=True)
class Run:
    """One run to do: ``arm`` at ``position`` of ``block`` (both count from 0)."""

    block: int
    position: int
    arm: str

    @property
    def name(self) -> str:
        """The stem of the run's files."""
        return run_name(self.block, self.position, self.arm)


def block_order(arms: Sequence[str], block: int, runs_per_block: int, seed: int) -> list[str]:
    """Draw one block's order; it depends only on the set of arms, the block and the seed.

    Raises
    ------
    ValueError
        No arm, an arm named twice, or ``runs_per_block`` below 1.
    """
    if not arms or len(set(arms)) != len(arms):
        raise ValueError(f"arms {list(arms)}: at least one, each named once")
    if runs_per_block < 1 or block < 0:
        raise ValueError("runs_per_block must be at least 1 and block at least 0")
    order = sorted(arms) * runs_per_block
    # A string seeds through SHA-512: the same order on every platform and Python version.
    random.Random(f"labkit blocks/{seed}/{block}/{'/'.join(order)}").shuffle(order)
    return order


def schedule(arms: Sequence[str], blocks: int, runs_per_block: int, seed: int) -> list[Run]:
    """Return all runs in order; more ``blocks`` only append to it."""
    return [
        Run(block, position, arm)
        for block in range(blocks)
        for position, arm in enumerate(block_order(arms, block, runs_per_block, seed))
    ]
