"""A radix tree to click: what a request finds in it, locks, adds, and what is evicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from docs.generators.block_tables_and_radix_tree import TEMPLATE, depth_first
from docs.generators.widgets.page import Widget
from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache.radix_tree import RadixPrefixCache

# The users A, B and C of the notes on mini-sglang, one who leaves their template in its middle, and
# one who shares nothing.
PROMPTS = {
    "A": [*TEMPLATE, "Q1"],
    "B": [*TEMPLATE, "Q2"],
    "C": [*TEMPLATE, "Q3"],
    "D": [*TEMPLATE[:3], "terse", "Q4"],
    "E": [f"x{place}" for place in range(1, 9)],
}
BLOCKS = 20
EVENTS = "AAABBC"


@dataclass(frozen=True)
class Moment:
    """The tree after an event, a user's letter: ``A`` arrives or gets a token, ``a`` ends A.

    ``found``, ``computed`` and ``evicted`` are tokens, as blocks have one each. ``missing`` blocks
    refuse the event. ``nodes`` are depth first: depth, tokens and locks.
    """

    event: str
    found: int
    computed: int
    evicted: int
    missing: int
    nodes: list[tuple[int, list[str], int]]
    free: int
    evictable: int


class _Play:
    """A prefix cache and its pool, with blocks of one token."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1, 1)
        self.tree = RadixPrefixCache(self.pool)
        self.words: list[str] = []
        self.tokens: dict[str, list[str]] = {}  # of a running user
        self.tables: dict[str, list[int]] = {}

    def ids(self, words: Sequence[str]) -> list[int]:
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return [self.words.index(word) for word in words]

    def happen(self, event: str) -> Moment:
        name = event.upper()
        found = computed = missing = 0
        evicted = self.tree.num_evicted
        if event == name:
            arrives = name not in self.tables
            tokens = PROMPTS[name] if arrives else [*self.tokens[name], self._next(name)]
            shared = self.tree.match(self.ids(tokens), len(tokens) - 1) if arrives else []
            found, computed = len(shared), len(tokens) - len(self.tables.get(name, shared))
            kept = self.pool.count_evictable(shared)
            missing = max(0, computed - (self.pool.num_free + self.pool.num_evictable - kept))
            if missing:
                found = computed = 0
            else:
                self._compute(name, tokens, shared if arrives else None, computed)
        elif name in self.tables:
            self.tree.release(name, self.tables.pop(name))
        evicted = self.tree.num_evicted - evicted
        free, evictable = self.pool.num_free, self.pool.num_evictable
        return Moment(event, found, computed, evicted, missing, self._nodes(), free, evictable)

    def _next(self, name: str) -> str:
        return f"{name.lower()}{len(self.tokens[name]) - len(PROMPTS[name]) + 1}"

    def _compute(
        self, name: str, tokens: Sequence[str], shared: list[int] | None, computed: int
    ) -> None:
        if shared is not None:
            self.tree.acquire(name, self.ids(tokens), shared)
            self.tables[name] = shared
        self.tree.evict(max(0, computed - self.pool.num_free))
        table = self.tables[name] + self.pool.allocate(computed)
        for index, block in self.tree.cache_blocks(name, self.ids(tokens), table).items():
            table[index] = block
        self.tokens[name], self.tables[name] = list(tokens), table

    def _nodes(self) -> list[tuple[int, list[str], int]]:
        depth: dict[int, int] = {}
        nodes = []
        for node in depth_first(self.tree):
            depth[id(node)] = depth.get(id(node.parent), -1) + 1
            words = [self.words[token] for (token,) in node.tokens]
            nodes.append((depth[id(node)], words, node.locks))
        return nodes


def play(blocks: int, events: str) -> list[Moment]:
    """Return the moments after the events, of a pool of ``blocks`` blocks of one token."""
    game = _Play(blocks)
    return [game.happen(event) for event in events]


def data() -> dict[str, Any]:
    """Return the users' prompts and where the page begins."""
    return {"prompts": PROMPTS, "blocks": BLOCKS, "events": EVENTS}


WIDGET = Widget(
    name="radix_tree",
    title="A prefix cache as a radix tree, to click",
    source="After the users A, B and C of M. Saroufim's notes on mini-sglang (2026-02-24).",
    mirrored="<code>labkit/engine/prefix_cache/radix_tree.py</code>",
    functions=("radix_tree",),
    data=data,
    text_page="structures",
)
