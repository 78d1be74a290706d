"""The binary search of a unit for its request, step by step: docs/binary-search.md.

What the kernels run (``binary_search``), with every step kept. Another batch, from its query
lengths: ``python -m docs.generators.binary_search_steps 1 1 40 64``.

Source: the widget of "One Launch for Any Batch: The Binary Search Inside vllm-metal's Varlen
Attention" (2026-06-12).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from labkit.kernel_abi import BQ

BATCH = (1, 1, 1, 1, 40, 64)  # decodes first, as the scheduler packs them
WIDTH = 64  # characters of a strip


@dataclass(frozen=True)
class Step:
    """One step: between ``low`` and ``high``, ``value`` at ``middle`` was compared with the unit.

    ``right``: the value is not above the unit, so that the owner is ``middle`` or behind it.
    """

    low: int
    high: int
    middle: int
    value: int
    right: bool


@dataclass(frozen=True)
class Walk:
    """A unit's search: its steps, and the request that it ended at."""

    unit: int
    steps: tuple[Step, ...]
    owner: int


def prefix_sums(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return ``cu_seqlens_q``: where each request's query tokens begin, and where all end."""
    return tuple(accumulate(lengths, initial=0))


def qblock_keys(prefix: Sequence[int]) -> tuple[int, ...]:
    """Return what Q-blocks are compared with: the first Q-block of each request."""
    return tuple(start // BQ + index for index, start in enumerate(prefix))


def walk(keys: Sequence[int], unit: int) -> Walk:
    """Search the largest ``i`` with ``keys[i] <= unit``, as the kernels do."""
    low, high, steps = 0, len(keys) - 1, list[Step]()
    while low < high:
        middle = (low + high + 1) // 2
        right = keys[middle] <= unit
        steps.append(Step(low, high, middle, keys[middle], right))
        low, high = (middle, high) if right else (low, middle - 1)
    return Walk(unit, tuple(steps), low)


def page(lengths: Sequence[int] = BATCH) -> str:
    """Return the walks of a batch as Markdown."""
    prefix = prefix_sums(lengths)
    keys, total = qblock_keys(prefix), prefix[-1]
    edges = [token for a, b in pairwise(prefix) for token in (a, b - 1)]
    tokens = [walk(prefix, token) for token in dict.fromkeys(edges)]
    blocks = [walk(keys, block) for block in range(total // BQ + len(lengths))]
    lines = [
        HEAD,
        "",
        f"## A batch of {len(lengths)} requests",
        "",
        f"Query lengths {', '.join(map(str, lengths))}: {total} packed query tokens.",
        "",
        *_strip(lengths, prefix),
        "",
        "## Query tokens (the decode kernel)",
        "",
        f"`cu_seqlens_q` = {list(prefix)}. Token t belongs to the largest i with "
        "`cu_seqlens_q[i] <= t`. The first and the last token of every request:",
        "",
        *_table("token", tokens),
        "",
        f"## Q-blocks of {BQ} rows (the tiled kernel)",
        "",
        f"`cu_seqlens_q[i] // {BQ} + i` = {list(keys)}: every request has len // {BQ} full blocks, "
        "and `+ i` counts a tail for each before it. The grid has "
        f"{total} // {BQ} + {len(lengths)} = {len(blocks)} blocks, which needs no query length; "
        "a block that begins behind its request's last row is surplus and exits.",
        "",
        *_table("block", blocks, lambda found: _rows(found, lengths, keys)),
    ]
    return "\n".join(lines) + "\n"


def _rows(found: Walk, lengths: Sequence[int], keys: Sequence[int]) -> str:
    """Say which rows of its request a Q-block computes."""
    first = (found.unit - keys[found.owner]) * BQ
    if found.owner >= len(lengths) or first >= lengths[found.owner]:
        return "surplus"
    return f"request {found.owner}, rows {first} to {min(first + BQ, lengths[found.owner]) - 1}"


def _table(unit: str, walks: Sequence[Walk], ends: object = None) -> Iterator[str]:
    most = max(len(found.steps) for found in walks)
    heads = [unit, *(f"step {n}" for n in range(1, most + 1)), "found"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for found in walks:
        steps = [_said(step, found.unit) for step in found.steps]
        end = ends(found) if callable(ends) else f"request {found.owner}"
        cells = [str(found.unit), *steps, *[""] * (most - len(steps)), end]
        yield f"| {' | '.join(cells)} |"


def _said(step: Step, unit: int) -> str:
    sign = "<=" if step.right else ">"
    return f"[{step.low}, {step.high}] mid {step.middle}: {step.value} {sign} {unit}"


def _strip(lengths: Sequence[int], prefix: Sequence[int]) -> Iterator[str]:
    """Draw the packed tokens as a strip, a character for one or more, named by their request."""
    per = max(1, -(-prefix[-1] // WIDTH))
    drawn = "".join(f"{index % 10}" * max(1, n // per) for index, n in enumerate(lengths))
    more = "" if per == 1 else f" (a character is up to {per} tokens of one request)"
    yield f"    {drawn}{more}"


HEAD = """\
# How a unit of the grid finds its request

A threadgroup knows its place in the grid and nothing else. Which request it works for is found by a
binary search over `cu_seqlens_q`, here step by step: in [low, high] the middle is compared, and the
half that cannot hold the owner goes. All threads of a threadgroup take the same steps. The seq_map
is the last column, built once on the host. `attention.search_iterations` counts the steps of all
units, and [labkit/metal/kernels/resolve.metal](../labkit/metal/kernels/resolve.metal) has them.

This page is written from `docs/generators/binary_search_steps.py`; for another batch:
`python -m docs.generators.binary_search_steps 1 1 40 64`."""


def main(words: Sequence[str]) -> int:
    """Print the page of a batch; 2 where a word is no length."""
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        print("labkit: walk: query lengths are whole numbers above 0", file=sys.stderr)
        return 2
    print(page([int(word) for word in words] or BATCH), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
