"""``engine.prefix_cache=hash``: a hash table of full blocks, keyed by parent block and tokens.

Block tables are append-only, as in vLLM. If a request computes a block that is cached already, the
request keeps its own copy, and later requests share the copy that was cached first. If all requests
that use the cached copy have ended, another request's copy replaces it in the table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache import NO_REMAP, PrefixCache, Remap
from labkit.engine.prefix_cache.eviction import EvictionOrder, EvictionPolicy, IdlePrefix

Tokens = tuple[int, ...]
ROOT = 0


@dataclass(slots=True, eq=False)
class CachedBlock:
    """An entry of the hash table: a cached block, and the number of requests that use it.

    ``uid`` identifies the entry and is never reused. ``parent`` is the uid of the previous block's
    entry. ``copies`` are other blocks with the same contents, each used by one request.
    ``num_uses`` counts all requests that used the entry, and ``floor`` is the largest key of the
    entries behind it.
    """

    uid: int
    parent: int
    tokens: Tokens
    block: int
    users: int = 0
    copies: list[int] = field(default_factory=list)
    num_uses: int = 1
    floor: float = -math.inf


class HashPrefixCache(PrefixCache):
    """A ``PrefixCache`` over a hash table.

    Every request has a *chain*: the entries of its prefix, each with the block that the request
    uses (the cached block or a copy). ``_idle`` has the entries without users. Chains are released
    from the end, so in ``_idle`` an entry comes before its parent.
    ``digest`` hashes (parent, tokens). Different blocks may have equal digests.
    """

    name = "hash"

    def __init__(
        self,
        pool: BlockPool,
        policy: EvictionPolicy | None = None,
        digest: Callable[[tuple[int, Tokens]], int] = hash,
    ) -> None:
        super().__init__(pool, policy)
        self._digest = digest
        self._buckets: dict[int, list[CachedBlock]] = {}
        self._chains: dict[str, list[tuple[CachedBlock, int]]] = {}
        self._idle = EvictionOrder[CachedBlock](self.policy)
        self._last_uid = ROOT

    def _tokens(self, token_ids: Sequence[int], index: int) -> Tokens:
        size = self._pool.block_size
        return tuple(token_ids[index * size : (index + 1) * size])

    def _find(self, parent: int, tokens: Tokens) -> CachedBlock | None:
        for entry in self._buckets.get(self._digest((parent, tokens)), ()):
            if entry.parent == parent and entry.tokens == tokens:
                return entry
        return None

    def _matching_entries(self, token_ids: Sequence[int], num_blocks: int) -> Iterator[CachedBlock]:
        parent = ROOT
        for index in range(num_blocks):
            entry = self._find(parent, self._tokens(token_ids, index))
            if entry is None:
                return
            yield entry
            parent = entry.uid

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        return [entry.block for entry in self._matching_entries(token_ids, num_blocks)]

    def _lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        chain = [(entry, entry.block) for entry in self._matching_entries(token_ids, num_blocks)]
        for entry, _ in chain:
            entry.users += 1
            entry.num_uses += 1
            self._idle.discard(entry)
        self._chains[request_id] = chain

    def _insert(self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> Remap:
        """Cache new blocks, and record copies of cached blocks. Nothing is remapped."""
        chain = self._chains[request_id]
        parent = chain[-1][0].uid if chain else ROOT
        for index in range(len(chain), len(block_ids)):
            tokens, block = self._tokens(token_ids, index), block_ids[index]
            entry = self._find(parent, tokens)
            if entry is None:
                entry = self._add(parent, tokens, block)
            else:
                self._add_copy(entry, block)
            chain.append((entry, block))
            parent = entry.uid
        return NO_REMAP

    def _add(self, parent: int, tokens: Tokens, block: int) -> CachedBlock:
        self._last_uid += 1
        entry = CachedBlock(self._last_uid, parent, tokens, block, users=1)
        self._buckets.setdefault(self._digest((parent, tokens)), []).append(entry)
        self._pool.cache([block])
        return entry

    def _add_copy(self, entry: CachedBlock, block: int) -> None:
        """Record the block of a request that computed an entry's tokens once more."""
        entry.copies.append(block)
        entry.num_uses += 1
        if not entry.users:
            self._idle.discard(entry)
            self._promote_copy(entry)

    def _unlock(self, request_id: str) -> None:
        """Remove a user from every entry of the request's chain, starting at its end."""
        chain = self._chains.pop(request_id)
        for index in reversed(range(len(chain))):
            entry, block = chain[index]
            if block != entry.block:
                entry.copies.remove(block)
            else:
                entry.users -= 1
            if not entry.users and entry.copies:
                self._promote_copy(entry)
            elif not entry.users:
                length = (index + 1) * self._pool.block_size
                prefix = IdlePrefix(length, entry.num_uses, self._num_releases)
                key, parent = self._idle.add(entry, prefix, entry.floor), chain[index - 1][0]
                parent.floor = max(parent.floor, key) if index else parent.floor
        self._idle.raise_failure()

    def _promote_copy(self, entry: CachedBlock) -> None:
        """Evict an entry's unused block, and cache its first copy instead.

        Without a user the entry could be evicted, although the request with the copy may use the
        entries behind it, which are found through this entry.
        """
        self._pool.evict([entry.block])
        entry.block, entry.users = entry.copies.pop(0), 1
        self._pool.cache([entry.block])

    def _remove(self, count: int) -> None:
        for _ in range(count):
            entry = self._idle.first
            self._idle.discard(entry)
            digest = self._digest((entry.parent, entry.tokens))
            self._buckets[digest].remove(entry)
            if not self._buckets[digest]:
                del self._buckets[digest]
            self._pool.evict([entry.block])

    def _entries(self) -> list[CachedBlock]:
        return [entry for bucket in self._buckets.values() for entry in bucket]

    def cached_blocks(self) -> Iterator[int]:
        children: dict[int, list[CachedBlock]] = {}
        for entry in self._entries():
            children.setdefault(entry.parent, []).append(entry)
        level = children.get(ROOT, [])
        while level:
            yield from (entry.block for entry in level)
            level = [child for entry in level for child in children.get(entry.uid, [])]

    def check(self) -> None:
        """Raise ``AssertionError`` unless users, chains, parents and eviction order agree."""
        entries = self._entries()
        used = Counter((e.uid, b) for chain in self._chains.values() for e, b in chain)
        expected = Counter((e.uid, b) for e in entries for b in [e.block] * e.users + e.copies)
        if used != expected:
            raise AssertionError("the users of a cached block disagree with the chains")
        if set(self._idle) != {entry for entry in entries if not entry.users}:
            raise AssertionError(
                "the order of eviction does not hold exactly the blocks without users"
            )
        if self._pool.num_evictable != len(self._idle):
            raise AssertionError("the blocks without users are not the evictable blocks")
        if len(list(self.cached_blocks())) != len(entries):
            raise AssertionError("a cached block cannot be reached from the root")
        later = set(self._idle)
        by_uid = {entry.uid: entry for entry in entries}
        for entry in self._idle:
            later.discard(entry)
            parent = by_uid.get(entry.parent)
            if parent is not None and not parent.users and parent not in later:
                raise AssertionError("a block would be evicted before the blocks behind it")
