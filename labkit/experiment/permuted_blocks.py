"""Permuted blocks: the random order of a cell's runs, drawn from its seed.

Each block is one uniformly random permutation of all arms, each ``runs_per_block`` times. The
permutation test relabels runs within blocks, so it matches this randomisation exactly. (A fixed
order such as ABAB is not valid under drift; see the permuted-block design of clinical trials.)

    >>> [run.arm for run in schedule(["base", "new"], blocks=1, runs_per_block=2, seed=0)]
    ['new', 'new', 'base', 'base']
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.records import run_name


@dataclass(frozen=True, slots=True)
class Run:
    """One scheduled run: ``arm`` at ``position`` of ``block`` (both count from 0)."""

    block: int
    position: int
    arm: str

    @property
    def name(self) -> str:
        """The run's name, which is the stem of its files: ``b00-p02-ARM``."""
        return run_name(self.block, self.position, self.arm)


def _block_order(arms: Sequence[str], block: int, runs_per_block: int, seed: int) -> list[str]:
    """Return the order of arms in a block, which depends only on the parameters."""
    if not arms or len(set(arms)) != len(arms):
        raise ValueError(
            f"arms {', '.join(arms)}: must be distinct, and there must be at least one"
        )
    if runs_per_block < 1 or block < 0:
        raise ValueError(
            f"runs_per_block={runs_per_block} must be at least 1, block={block} at least 0"
        )
    order = sorted(arms) * runs_per_block
    # Python hashes a string seed with SHA-512: the same order on every platform and version.
    random.Random(f"labkit blocks/{seed}/{block}/{'/'.join(order)}").shuffle(order)
    return order


def schedule(arms: Sequence[str], blocks: int, runs_per_block: int, seed: int) -> list[Run]:
    """Return all runs in order. Increasing ``blocks`` only appends runs."""
    return [
        Run(block, position, arm)
        for block in range(blocks)
        for position, arm in enumerate(_block_order(arms, block, runs_per_block, seed))
    ]
