"""Interim looks, and the fewest blocks, at which a cell with this many arms can be significant.

The smallest adjusted p after ``b`` blocks grows with the number of arms that are tested together. A
look that cannot reach its part of alpha would spend it for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from labkit.analysis.statistics.power import min_blocks_to_claim
from labkit.config import ConfigError, Design, PlannedLook, count_text, require
from labkit.records import RecordError, read_cell

MAX_BLOCKS = 1000
LOOK_SHARES, LOOK_ALPHA_SHARE = (0.6, 0.8), 0.2  # of the blocks, and of alpha
MIN_BLOCKS_WITH_LOOK = 10


def with_reachable_looks(design: Design, arms: int, folder: Path, blocks_given: bool) -> Design:
    """Return a design that can claim something about ``arms`` arms at each of its looks.

    A look out of reach gives its alpha to the next one. A design that claims nothing even after
    its last block has as many blocks as it needs; a first look, which has too few blocks for one
    arm as well, stays one. A cell that an earlier version began with looks out of reach continues
    unchanged.

    ``arms``: how many are tested together; 1 for a sweep. ``folder``: the cell's, which need not
    exist. ``blocks_given``: whether the command sets ``design.blocks``, so that too few raise
    ``ConfigError`` instead of being changed.
    """
    blocks = range(design.blocks, MAX_BLOCKS + 1)
    if _first_that_reaches(design.alpha, blocks, design, 1) > design.blocks:
        return design
    if not all(_reaches(look.blocks, look.alpha, design, arms) for look in _begun_looks(folder)):
        return design
    needed = _first_that_reaches(design.alpha, blocks, design, arms)
    require(
        needed == design.blocks or not blocks_given,
        f"design.blocks={design.blocks}: with {arms} arms, no difference can reach "
        f"p = {design.alpha:g} (smallest: {arms * design.smallest_p(design.blocks):.2g})"
        f"; set design.blocks={needed}, or compare fewer arms than {arms}",
    )
    design = replace(design, blocks=needed)
    looks = list(_reachable(design, arms))
    return replace(design, looks=looks if len(looks) > 1 else [])


def fewest_blocks(design: Design, arms: int) -> int:
    """Return the number of blocks from which a claim about ``arms`` arms is possible.

    Raises ``ConfigError`` if ``design.alpha`` is too small for it.
    """
    blocks = range(min_blocks_to_claim(design.runs_per_block), MAX_BLOCKS + 1)
    alpha = design.alpha * (1 - LOOK_ALPHA_SHARE)
    _first_that_reaches(alpha, blocks[-1:], design, arms)  # there may be as many blocks
    return _first_that_reaches(alpha, blocks, design, arms)


def _first_that_reaches(alpha: float, blocks: Sequence[int], design: Design, arms: int) -> int:
    """Return the first of ``blocks`` after which p can reach ``alpha``."""
    found = next((count for count in blocks if _reaches(count, alpha, design, arms)), None)
    if found is None:
        smallest = arms * min(map(design.smallest_p, blocks))
        last = f"the last look has {alpha:g}, and " if alpha < design.alpha else ""
        raise ConfigError(
            f"design.alpha={design.alpha:g}: {last}with {count_text(arms, 'arm')} no p of so "
            f"many blocks is below {smallest:.2g}; set a larger alpha"
        )
    return found


def planned_looks(design: Design, arms: int, blocks: int) -> list[PlannedLook]:
    """Return the looks of a design whose number of blocks follows from its time.

    One look after 60 to 80 % of the blocks spends a fifth of alpha, which costs the end little and
    lets large effects stop early. It comes as early as it can claim something, or not at all.
    """
    alpha, (earliest, latest) = LOOK_ALPHA_SHARE * design.alpha, LOOK_SHARES
    reachable = (
        count
        for count in range(math.ceil(earliest * blocks), int(latest * blocks) + 1)
        if arms * design.smallest_p(count) <= alpha
    )
    first = next(reachable, None)
    if blocks < MIN_BLOCKS_WITH_LOOK or first is None:
        return []
    return [PlannedLook(first, alpha), PlannedLook(blocks, design.alpha - alpha)]


def _reachable(design: Design, arms: int) -> Iterator[PlannedLook]:
    unspent = 0.0
    for look in design.all_looks:
        alpha = round(look.alpha + unspent, 12)
        if _reaches(look.blocks, alpha, design, arms) or look.blocks == design.blocks:
            yield PlannedLook(look.blocks, alpha)
            unspent = 0.0
        else:
            unspent = alpha


def _reaches(blocks: int, alpha: float, design: Design, arms: int) -> bool:
    return arms * design.smallest_p(blocks) <= alpha


def _begun_looks(folder: Path) -> list[PlannedLook]:
    with suppress(RecordError):  # there is no such cell, or the runner will refuse it
        return [PlannedLook(**look) for look in read_cell(folder)["design"].get("looks", ())]
    return []
