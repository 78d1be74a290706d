"""Interim analysis: predeclared looks at the data that may stop a study early.

Looks are numbers of blocks, declared before the first run. Each look spends a fixed part of
alpha. The parts sum to at most alpha (C. E. Bonferroni), so the chance of a false claim does not
exceed alpha, whatever the number of looks. At a look, the test and the interval use only that
look's part. For another reason a study stops early only if its blocks take much longer than planned
(:mod:`labkit.experiment.schedule.cell_time_limit`). Effects are only estimated, and nothing is
claimed, between looks, before the end of a study without looks, and after an undeclared look:
blocks were added after results had been shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class InterimLook:
    """A predeclared look after ``blocks`` blocks, which may spend ``alpha``."""

    blocks: int
    alpha: float


def parse_looks(plain: Sequence[Mapping[str, Any]] | None, alpha: float) -> tuple[InterimLook, ...]:
    """Parse the declared looks ``[{blocks, alpha}]``; return an empty tuple if there are none.

    Raises ``ValueError`` if the numbers of blocks do not increase, or the looks spend more than
    ``alpha``.
    """
    looks = tuple(InterimLook(int(item["blocks"]), float(item["alpha"])) for item in plain or ())
    blocks = [look.blocks for look in looks]
    if blocks != sorted(set(blocks)):
        raise ValueError(
            f"design.looks: the blocks ({', '.join(map(str, blocks))}) must increase from look to "
            "look"
        )
    if sum(look.alpha for look in looks) > alpha * (1 + 1e-9):
        raise ValueError(f"design.looks: the looks together spend more than design.alpha={alpha}")
    return looks


def alpha_at(looks: Sequence[InterimLook], blocks: int, alpha: float) -> float:
    """Return the significance level of a test after ``blocks`` blocks.

    Without looks it is ``alpha``. With looks it is the part of the look declared at ``blocks``, or
    0 if there is none, because a claim between two looks would be an undeclared look.
    """
    if not looks:
        return alpha
    return next((look.alpha for look in looks if look.blocks == blocks), 0.0)


def withheld_reason(
    done: int, planned: int, looks: Sequence[InterimLook], shown: Sequence[int]
) -> str | None:
    """Return the reason why nothing may be claimed after ``done`` blocks, or None.

    ``planned``: number of blocks of the design. If the design has looks, the number up to the next
    look. ``shown``: numbers of blocks after which results were shown.
    """
    declared = {look.blocks for look in looks}
    undeclared = [n for n in shown if n < done and n not in declared]
    if undeclared:
        steps = " -> ".join(map(str, dict.fromkeys([*undeclared, done])))
        return f"exploratory: blocks were added after results were shown ({steps})"
    if looks and done not in declared:
        return f"no look was declared after {done} blocks"
    if done < planned:
        return f"{done} of {planned} blocks are done, and no look was declared before the end"
    return None
