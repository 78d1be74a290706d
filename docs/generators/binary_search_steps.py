"""Generator of docs/binary-search.md: how a unit of the grid finds its request, step by step.

A unit is a query token (decode kernel) or a Q-block (tiled kernel). The search is that of the
resolver ``binary_search``, with every step recorded. For another batch, give its query lengths:
``python -m docs.generators.binary_search_steps 1 1 40 64``.

Source: the widget of "One Launch for Any Batch: The Binary Search Inside vllm-metal's Varlen
Attention" (2026-06-12).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from labkit.kernel_constants import BQ

BATCH = (1, 1, 1, 1, 40, 64)  # decodes first, as the scheduler packs them
STRIP_CHARACTERS = 64


@dataclass(frozen=True)
class SearchStep:
    """One step of a search in [``low``, ``high``]: ``value``, the key at ``middle``, is compared.

    ``right``: the value is at most the unit, so the owner is ``middle`` or a later request.
    """

    low: int
    high: int
    middle: int
    value: int
    right: bool


@dataclass(frozen=True)
class Search:
    """A unit's search: its steps, and the index of the request that owns the unit."""

    unit: int
    steps: tuple[SearchStep, ...]
    owner: int


def prefix_sums(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return ``cu_seqlens_q``: the first query token of each request, then the total number."""
    return tuple(accumulate(lengths, initial=0))


def qblock_keys(prefix: Sequence[int]) -> tuple[int, ...]:
    """Return the search keys of the tiled kernel: the first Q-block of each request."""
    return tuple(start // BQ + index for index, start in enumerate(prefix))


def search(keys: Sequence[int], unit: int) -> Search:
    """Find the largest ``i`` with ``keys[i] <= unit``, as the kernels do."""
    low, high, steps = 0, len(keys) - 1, list[SearchStep]()
    while low < high:
        middle = (low + high + 1) // 2
        right = keys[middle] <= unit
        steps.append(SearchStep(low, high, middle, keys[middle], right))
        low, high = (middle, high) if right else (low, middle - 1)
    return Search(unit, tuple(steps), low)


def page(lengths: Sequence[int] = BATCH) -> str:
    """Return the Markdown page with the searches of a batch."""
    prefix = prefix_sums(lengths)
    keys, total = qblock_keys(prefix), prefix[-1]
    edges = [token for a, b in pairwise(prefix) for token in (a, b - 1)]
    tokens = [search(prefix, token) for token in dict.fromkeys(edges)]
    blocks = [search(keys, block) for block in range(total // BQ + len(lengths))]
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
        "and `+ i` allows one partial block for each request before it. The grid has "
        f"{total} // {BQ} + {len(lengths)} = {len(blocks)} blocks, a bound that needs no query "
        "lengths. A block that begins after its request's last row is surplus and exits.",
        "",
        *_table("block", blocks, lambda search: _rows(search, lengths, keys)),
    ]
    return "\n".join(lines) + "\n"


def qblock_rows(search: Search, lengths: Sequence[int], keys: Sequence[int]) -> range | None:
    """Return the rows of the owner that a Q-block computes, or None if the Q-block is surplus."""
    owner = search.owner
    first = (search.unit - keys[owner]) * BQ
    if owner >= len(lengths) or first >= lengths[owner]:
        return None
    return range(first, min(first + BQ, lengths[owner]))


def max_steps(num_seqs: int) -> int:
    """Return the largest number of steps of a search among ``num_seqs`` requests.

    It is the logarithm to base 2 of ``num_seqs + 1``, rounded up.
    """
    return num_seqs.bit_length()


def _rows(search: Search, lengths: Sequence[int], keys: Sequence[int]) -> str:
    """Return the request and the rows that a Q-block computes, or ``surplus``."""
    rows = qblock_rows(search, lengths, keys)
    if rows is None:
        return "surplus"
    return f"request {search.owner}, rows {rows[0]} to {rows[-1]}"


def _request(search: Search) -> str:
    return f"request {search.owner}"


def _table(
    unit: str, searches: Sequence[Search], result: Callable[[Search], str] = _request
) -> Iterator[str]:
    max_steps = max(len(search.steps) for search in searches)
    heads = [unit, *(f"step {n}" for n in range(1, max_steps + 1)), "result"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for search in searches:
        steps = [_comparison(step, search.unit) for step in search.steps]
        padding = [""] * (max_steps - len(steps))
        yield f"| {' | '.join([str(search.unit), *steps, *padding, result(search)])} |"


def _comparison(step: SearchStep, unit: int) -> str:
    sign = "<=" if step.right else ">"
    return f"[{step.low}, {step.high}] mid {step.middle}: {step.value} {sign} {unit}"


def _strip(lengths: Sequence[int], prefix: Sequence[int]) -> Iterator[str]:
    """Draw the packed tokens as a line of digits: a token's digit is its request's index mod 10."""
    per = max(1, -(-prefix[-1] // STRIP_CHARACTERS))
    strip = "".join(f"{index % 10}" * max(1, n // per) for index, n in enumerate(lengths))
    note = "" if per == 1 else f" (a character is up to {per} tokens of one request)"
    yield f"    {strip}{note}"


HEAD = """\
# How a unit of the grid finds its request

A threadgroup knows only its place in the grid. It finds the request that it works for by a binary
search over `cu_seqlens_q`: each step compares the middle of [low, high] with the unit and drops the
half that cannot contain the owner. All threads of a threadgroup take the same steps. The resolver
`seq_map` needs no search: the host builds the last column once per step. The counter
`attention.search_iterations` is the number of steps of all units. The search is in
[labkit/metal/kernels/resolve.metal](../labkit/metal/kernels/resolve.metal).

`docs/generators/binary_search_steps.py` generates this page. For another batch:
`python -m docs.generators.binary_search_steps 1 1 40 64`."""


def main(arguments: Sequence[str]) -> int:
    """Print the page of a batch, and return the exit code: 2 if an argument is not a length."""
    if not all(text.isdecimal() and int(text) > 0 for text in arguments):
        print("binary_search_steps: query lengths must be integers above 0", file=sys.stderr)
        return 2
    print(page([int(text) for text in arguments] or BATCH), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
