"""Sequential looks: stopping early without fooling oneself.

The looks (numbers of blocks) are declared before the first run, and each spends a part of
alpha fixed beforehand; the parts sum to alpha (C. E. Bonferroni), so that however many
looks are taken the chance of a false claim stays below alpha. At a look the test and the
interval use that look's part alone. There is no other early stopping: between looks, before
the end, and after blocks were added to a study whose results had been shown (a look that
nobody declared), effects are estimated and nothing is claimed.
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
    """Read declared looks ``[{blocks, alpha}]``; none declared: an empty tuple.

    Raises
    ------
    ValueError
        The looks do not grow, or together spend more than ``alpha``.
    """
    looks = tuple(InterimLook(int(item["blocks"]), float(item["alpha"])) for item in plain or ())
    blocks = [look.blocks for look in looks]
    if blocks != sorted(set(blocks)):
        raise ValueError(f"design.looks: blocks {blocks} must grow from look to look")
    if sum(look.alpha for look in looks) > alpha * (1 + 1e-9):
        raise ValueError(f"design.looks: the looks spend more than alpha={alpha}")
    return looks


def alpha_at(looks: Sequence[InterimLook], blocks: int, alpha: float) -> float:
    """Return the level of a test after ``blocks`` blocks.

    Without looks: ``alpha``. At a look: its part. Anywhere else 0: a claim from an
    interrupted study, between two looks, would be a look that was not declared.
    """
    if not looks:
        return alpha
    return next((look.alpha for look in looks if look.blocks == blocks), 0.0)


def withheld_reason(
    done: int, asked: int, looks: Sequence[InterimLook], shown: Sequence[int]
) -> str | None:
    """Say why nothing may be claimed after ``done`` blocks; None where it may.

    Parameters
    ----------
    asked
        How many blocks the design has (with looks: up to the next one).
    shown
        After how many blocks results were shown.
    """
    declared = {look.blocks for look in looks}
    grown = [n for n in shown if n < done and n not in declared]
    if grown:
        steps = " -> ".join(map(str, dict.fromkeys([*grown, done])))
        return f"exploratory: blocks were added after results were shown ({steps})"
    if looks and done not in declared:
        return f"no look was declared after {done} blocks"
    if done < asked:
        return f"{done} of {asked} blocks are done: a claim before the end was not declared"
    return None
