"""``engine.prefix_cache=radix``: a radix tree whose nodes are spans of full blocks.

The design is that of SGLang's radix cache. A node is split where two sequences diverge. It is
locked while a request uses it or a node below it. Leaves are evicted from their ends. If a request
computes blocks that the tree has already, the request's own blocks are freed, and its block table
is remapped to the tree's blocks. docs/structures.md shows a tree step by step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache import PrefixCache, Remap
from labkit.engine.prefix_cache.eviction import EvictionOrder, EvictionPolicy, IdlePrefix

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class RadixNode:
    """A node with a span of blocks: ``tokens[i]`` are the tokens of ``blocks[i]``.

    The root's span is empty. ``children`` maps the tokens of a child's first block to the child.
    ``locks`` is the number of requests whose prefix ends in this node or below it, ``num_uses``
    that of all requests that ever locked it. ``floor`` is the largest key of the nodes below it.
    """

    parent: RadixNode | None
    tokens: list[Tokens]
    blocks: list[int]
    children: dict[Tokens, RadixNode] = field(default_factory=dict)
    locks: int = 0
    num_uses: int = 1
    floor: float = -math.inf

    def common_blocks(self, tokens: Sequence[Tokens]) -> int:
        """Return the length in blocks of the common prefix of the node's span and ``tokens``."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens))
        )


class RadixPrefixCache(PrefixCache):
    """A ``PrefixCache`` over a radix tree.

    Every request's prefix ends with the last block of a node, the request's *end*. ``_idle`` has
    the nodes without locks. Paths are unlocked from the end to the root, so in ``_idle`` a node
    comes before its parent.
    """

    name = "radix"

    def __init__(self, pool: BlockPool, policy: EvictionPolicy | None = None) -> None:
        super().__init__(pool, policy)
        self._root = RadixNode(None, [], [])
        self._ends: dict[str, RadixNode] = {}
        self._idle = EvictionOrder[RadixNode](self.policy)

    def _spans(self, token_ids: Sequence[int], first: int, stop: int) -> list[Tokens]:
        size = self._pool.block_size
        return [tuple(token_ids[i * size : (i + 1) * size]) for i in range(first, stop)]

    def _matching_nodes(
        self, node: RadixNode, tokens: Sequence[Tokens]
    ) -> Iterator[tuple[RadixNode, int]]:
        """Yield each node below ``node`` that matches ``tokens``, and how many blocks match."""
        position = 0
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                return
            common = child.common_blocks(tokens[position:])
            yield child, common
            if common < len(child.tokens):
                return
            position += common
            node = child

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        path = self._matching_nodes(self._root, self._spans(token_ids, 0, num_blocks))
        return [block for node, common in path for block in node.blocks[:common]]

    def _lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Lock the prefix's path, and split the node in which the prefix ends."""
        end = self._root
        # Locking may split a node, so all matching nodes are found first.
        for node, common in list(self._matching_nodes(end, self._spans(token_ids, 0, num_blocks))):
            end = self._lock_node(node, common)
        self._ends[request_id] = end

    def _lock_node(self, node: RadixNode, common: int) -> RadixNode:
        """Lock a node's first ``common`` blocks, split from the others; return their node."""
        if common < len(node.tokens):
            node = self._split(node, common)
        self._idle.discard(node)
        node.locks += 1
        node.num_uses += 1
        return node

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Move the first ``at`` blocks to a new parent node and return it. The caller must lock it.

        ``node`` keeps the other blocks. It remains the end of its requests and keeps its position
        in the order of eviction.
        """
        assert node.parent is not None
        upper = RadixNode(node.parent, node.tokens[:at], node.blocks[:at])
        upper.locks, upper.num_uses = node.locks, node.num_uses
        upper.floor = max(node.floor, self._idle.key_of(node))
        upper.children[node.tokens[at]] = node
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.tokens, node.blocks = upper, node.tokens[at:], node.blocks[at:]
        return upper

    def _insert(self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> Remap:
        """Insert new blocks below the request's end; remap blocks that the tree has already."""
        end, remap = self._ends[request_id], {}
        position = self._depth(end)
        tokens = self._spans(token_ids, position, len(block_ids))
        # Locking may split a node, so all matching nodes are found first.
        for node, common in list(self._matching_nodes(end, tokens)):
            end = self._lock_node(node, common)
            for offset, block in enumerate(end.blocks):
                remap[position + offset] = block
            position += common
        if position < len(block_ids):
            new = len(block_ids) - position
            end = self._append(end, tokens[-new:], list(block_ids[position:]))
        self._ends[request_id] = end
        return remap

    def _depth(self, node: RadixNode) -> int:
        return sum(len(ancestor.blocks) for ancestor in self._path(node))

    def _path(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield a node and its ancestors below the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _append(self, end: RadixNode, tokens: list[Tokens], blocks: list[int]) -> RadixNode:
        """Append blocks to ``end`` if it is a leaf that only this request has ever locked.

        Otherwise add a locked leaf below ``end``: the new blocks have no earlier uses. Return the
        request's new end.
        """
        self._pool.cache(blocks)
        if end is not self._root and not end.children and end.num_uses == 1:
            end.tokens += tokens
            end.blocks += blocks
            return end
        leaf = RadixNode(end, tokens, blocks)
        leaf.locks = 1
        end.children[tokens[0]] = leaf
        return leaf

    def _unlock(self, request_id: str) -> None:
        end = self._ends.pop(request_id)
        depth = self._depth(end)
        for node in self._path(end):
            node.locks -= 1
            if not node.locks:
                length = depth * self._pool.block_size
                prefix = IdlePrefix(length, node.num_uses, self._num_releases)
                key, parent = self._idle.add(node, prefix, node.floor), node.parent
                assert parent is not None
                parent.floor = max(parent.floor, key)
            depth -= len(node.blocks)
        self._idle.raise_failure()

    def _remove(self, count: int) -> None:
        """Remove ``count`` blocks from the ends of the first nodes in the order of eviction."""
        while count:
            node = self._idle.first
            kept = max(0, len(node.blocks) - count)
            count -= len(node.blocks) - kept
            self._pool.evict(node.blocks[kept:])
            if not kept:
                assert node.parent is not None
                del node.parent.children[node.tokens[0]]
                self._idle.discard(node)
            del node.tokens[kept:], node.blocks[kept:]

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node below the root, parents first."""
        level = list(self._root.children.values())
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    def cached_blocks(self) -> Iterator[int]:
        return (block for node in self.nodes() for block in node.blocks)

    def check(self) -> None:
        """Raise ``AssertionError`` unless nodes, locks, ends and eviction order agree."""
        nodes = list(self.nodes())
        for node in nodes:
            if not node.blocks or len(node.blocks) != len(node.tokens):
                raise AssertionError("a node has different numbers of blocks and token spans")
            if any(key != child.tokens[0] for key, child in node.children.items()):
                raise AssertionError("a child cannot be found by its first tokens")
        locks = Counter(node for end in self._ends.values() for node in self._path(end))
        if any(node.locks != locks[node] for node in nodes):
            raise AssertionError("a node's locks disagree with the requests that end below it")
        if set(self._idle) != {node for node in nodes if not node.locks}:
            raise AssertionError(
                "the order of eviction does not hold exactly the nodes without locks"
            )
        if self._pool.num_evictable != sum(len(node.blocks) for node in self._idle):
            raise AssertionError("the blocks without locks are not the evictable blocks")
        later = set(self._idle)
        for node in self._idle:
            later.discard(node)
            if any(child in later or child.locks for child in node.children.values()):
                raise AssertionError("a node would be evicted before the nodes below it")
