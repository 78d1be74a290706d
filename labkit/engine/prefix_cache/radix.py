"""``engine.prefix_cache=radix``: a tree whose edges are spans of full blocks.

After SGLang's radix cache: a node is split where two sequences part, is locked while a
request uses it or anything below it, and leaves are evicted from their ends. What a
request computed although it is in the tree already is given back: its block table is
remapped to the tree's blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache import PrefixCache, Remap

Tokens = tuple[int, ...]


class Node:
    """A span of blocks: ``tokens[i]`` are those of ``blocks[i]``; the root's is empty.

    ``children`` are found by their first block's tokens. ``locks`` counts the requests
    whose prefix ends in the node or below it.
    """

    __slots__ = ("blocks", "children", "locks", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: list[Tokens], blocks: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[Tokens, Node] = {}
        self.locks = 0

    def common(self, tokens: Sequence[Tokens]) -> int:
        """Return how many of the span's blocks ``tokens`` begins with."""
        pairs = zip(self.tokens, tokens, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens))
        )


class RadixPrefixCache(PrefixCache):
    """A ``PrefixCache`` over a radix tree.

    Every request's prefix ends with the last block of a node, its *end*. Nodes without
    locks wait in ``_idle`` in the order of their release; paths are unlocked from the end
    to the root, so a node always comes before its parent there.
    """

    name = "radix"

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._root = Node(None, [], [])
        self._ends: dict[str, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self.num_evicted = 0

    def _spans(self, token_ids: Sequence[int], first: int, stop: int) -> list[Tokens]:
        size = self._block_size
        return [tuple(token_ids[i * size : (i + 1) * size]) for i in range(first, stop)]

    def _walk(self, node: Node, tokens: Sequence[Tokens]) -> Iterator[tuple[Node, int]]:
        """Yield the nodes below ``node`` along ``tokens``, each with its blocks in common."""
        position = 0
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                return
            common = child.common(tokens[position:])
            yield child, common
            if common < len(child.tokens):
                return
            position += common
            node = child

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Walk from the root, into the middle of a span where it must; see ``PrefixCache``."""
        path = self._walk(self._root, self._spans(token_ids, 0, num_blocks))
        return [block for node, common in path for block in node.blocks[:common]]

    def lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Split the tree where the prefix ends and lock the path to there."""
        end = self._root
        for node, common in list(self._walk(end, self._spans(token_ids, 0, num_blocks))):
            end = self._locked(node, common)
        self._ends[request_id] = end

    def _locked(self, node: Node, common: int) -> Node:
        """Lock the first ``common`` blocks of a node, splitting off the others below them."""
        if common < len(node.tokens):
            node = self._split(node, common)
        self._idle.pop(node, None)
        node.locks += 1
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Put the first ``at`` blocks into a new node above, which the caller must lock.

        The node itself stays below: it is still the end of whoever ends in it, and keeps
        its place among the idle.
        """
        assert node.parent is not None
        upper = Node(node.parent, node.tokens[:at], node.blocks[:at])
        upper.locks = node.locks
        upper.children[node.tokens[at]] = node
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.tokens, node.blocks = upper, node.tokens[at:], node.blocks[at:]
        return upper

    def cache_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> Remap:
        """Insert what is new below the request's end; remap what the tree holds already."""
        end, remap = self._ends[request_id], {}
        position = self._depth(end)
        tokens = self._spans(token_ids, position, len(block_ids))
        for node, common in list(self._walk(end, tokens)):
            end = self._locked(node, common)
            for offset, block in enumerate(end.blocks):
                remap[position + offset] = block
            position += common
        if position < len(block_ids):
            new = len(block_ids) - position
            end = self._insert(end, tokens[-new:], list(block_ids[position:]))
        self._ends[request_id] = end
        return remap

    def _depth(self, node: Node) -> int:
        """Return how many blocks lead to the end of ``node``."""
        return sum(len(ancestor.blocks) for ancestor in self._path(node))

    def _path(self, node: Node) -> Iterator[Node]:
        """Yield a node and its ancestors below the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _insert(self, end: Node, tokens: list[Tokens], blocks: list[int]) -> Node:
        """Grow a leaf that only this request uses; else begin a new one, locked."""
        self._pool.cache(blocks)
        if end is not self._root and not end.children and end.locks == 1:
            end.tokens += tokens
            end.blocks += blocks
            return end
        leaf = Node(end, tokens, blocks)
        leaf.locks = 1
        end.children[tokens[0]] = leaf
        return leaf

    def unlock(self, request_id: str) -> None:
        """Unlock the path from the request's end to the root."""
        for node in self._path(self._ends.pop(request_id)):
            node.locks -= 1
            if not node.locks:
                self._idle[node] = None

    def evict(self, count: int) -> None:
        """Cut ``count`` blocks from the ends of the leaves released first."""
        if count > self._pool.num_evictable:
            raise ValueError(f"evict({count}): {self._pool.num_evictable} blocks are idle")
        self._cut(count)
        self.num_evicted += count

    def clear(self) -> None:
        """Remove every node that is not locked."""
        self._cut(self._pool.num_evictable)

    def _cut(self, count: int) -> None:
        while count:
            node = next(iter(self._idle))
            rest = max(0, len(node.blocks) - count)
            count -= len(node.blocks) - rest
            self._pool.evict(node.blocks[rest:])
            if not rest:
                assert node.parent is not None
                del node.parent.children[node.tokens[0]]
                del self._idle[node]
            del node.tokens[rest:], node.blocks[rest:]

    def nodes(self) -> Iterator[Node]:
        """Yield every node below the root, parents first."""
        level = list(self._root.children.values())
        while level:
            yield from level
            level = [child for node in level for child in node.children.values()]

    def cached_blocks(self) -> Iterator[int]:
        """Yield the blocks of every node."""
        return (block for node in self.nodes() for block in node.blocks)

    def check(self) -> None:
        """Compare locks with the requests' ends, and the tree and the idle queue with both."""
        nodes = list(self.nodes())
        for node in nodes:
            if not node.blocks or len(node.blocks) != len(node.tokens):
                raise AssertionError("a node's blocks are not its tokens'")
            if any(key != child.tokens[0] for key, child in node.children.items()):
                raise AssertionError("a child cannot be found by its first tokens")
        locks = Counter(node for end in self._ends.values() for node in self._path(end))
        if any(node.locks != locks[node] for node in nodes):
            raise AssertionError("a node's locks disagree with the requests that end below it")
        if set(self._idle) != {node for node in nodes if not node.locks}:
            raise AssertionError("the idle queue is not the nodes without locks")
        if self._pool.num_evictable != sum(len(node.blocks) for node in self._idle):
            raise AssertionError("the blocks without locks are not those without owners")
        later = set(self._idle)
        for node in self._idle:
            later.discard(node)
            if any(child in later or child.locks for child in node.children.values()):
                raise AssertionError("a node would be evicted before the nodes below it")
