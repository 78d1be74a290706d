"""``engine.prefix_cache=hash``: one table of full blocks, each found by parent and tokens.

Block tables only ever grow, as in vLLM: a request that computed what is cached already
goes on with its own copy, and the copy that came first serves the next. Where that one's
last owner leaves before the others, another copy takes its place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache import NOTHING, PrefixCache, Remap

Tokens = tuple[int, ...]
ROOT = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A cached block; ``uid`` and ``parent``, another's uid, name no two entries ever.

    ``users`` requests own ``block``; each of ``copies`` is owned by one that computed it.
    """

    uid: int
    parent: int
    tokens: Tokens
    block: int
    users: int = 0
    copies: list[int] = field(default_factory=list)


class HashPrefixCache(PrefixCache):
    """A ``PrefixCache`` over a hash table.

    Every request keeps a *chain*: the entries of its own prefix, found or published, and
    which block it owns of each. Entries that no request owns wait in ``_idle`` in the order
    of their release; chains are released tail first, so an entry always comes before its
    parent there. ``digest`` hashes (parent, tokens); equal digests may mean different blocks.
    """

    name = "hash"

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        digest: Callable[[tuple[int, Tokens]], int] = hash,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._digest = digest
        self._buckets: dict[int, list[Entry]] = {}
        self._chains: dict[str, list[tuple[Entry, int]]] = {}
        self._idle: OrderedDict[Entry, None] = OrderedDict()
        self._last_uid = ROOT
        self.num_evicted = 0

    def _tokens(self, token_ids: Sequence[int], index: int) -> Tokens:
        return tuple(token_ids[index * self._block_size : (index + 1) * self._block_size])

    def _find(self, parent: int, tokens: Tokens) -> Entry | None:
        for entry in self._buckets.get(self._digest((parent, tokens)), ()):
            if entry.parent == parent and entry.tokens == tokens:
                return entry
        return None

    def _walk(self, token_ids: Sequence[int], num_blocks: int) -> Iterator[Entry]:
        parent = ROOT
        for index in range(num_blocks):
            entry = self._find(parent, self._tokens(token_ids, index))
            if entry is None:
                return
            yield entry
            parent = entry.uid

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Walk from the root as far as blocks are found; see ``PrefixCache``."""
        return [entry.block for entry in self._walk(token_ids, num_blocks)]

    def lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Use every entry of the prefix."""
        chain = [(entry, entry.block) for entry in self._walk(token_ids, num_blocks)]
        for entry, _ in chain:
            entry.users += 1
            self._idle.pop(entry, None)
        self._chains[request_id] = chain

    def cache_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> Remap:
        """Add the blocks that are new, note the copies of those that are not; remap nothing."""
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
        return NOTHING

    def _add(self, parent: int, tokens: Tokens, block: int) -> Entry:
        self._last_uid += 1
        entry = Entry(self._last_uid, parent, tokens, block, users=1)
        self._buckets.setdefault(self._digest((parent, tokens)), []).append(entry)
        self._pool.cache([block])
        return entry

    def _add_copy(self, entry: Entry, block: int) -> None:
        entry.copies.append(block)
        if not entry.users:
            del self._idle[entry]
            self._replace(entry)

    def unlock(self, request_id: str) -> None:
        """Use the chain no longer, tail first."""
        for entry, block in reversed(self._chains.pop(request_id)):
            if block != entry.block:
                entry.copies.remove(block)
            else:
                entry.users -= 1
            if not entry.users and entry.copies:
                self._replace(entry)
            elif not entry.users:
                self._idle[entry] = None

    def _replace(self, entry: Entry) -> None:
        """Put a copy in the place of a block that nobody owns: one of the same is enough."""
        self._pool.evict([entry.block])
        entry.block, entry.users = entry.copies.pop(0), 1
        self._pool.cache([entry.block])

    def evict(self, count: int) -> None:
        """Remove the ``count`` entries released first."""
        if count > len(self._idle):
            raise ValueError(f"evict({count}): {len(self._idle)} blocks are idle")
        self._remove(count)
        self.num_evicted += count

    def clear(self) -> None:
        """Remove every idle entry."""
        self._remove(len(self._idle))

    def _remove(self, count: int) -> None:
        for _ in range(count):
            entry, _none = self._idle.popitem(last=False)
            digest = self._digest((entry.parent, entry.tokens))
            self._buckets[digest].remove(entry)
            if not self._buckets[digest]:
                del self._buckets[digest]
            self._pool.evict([entry.block])

    def _entries(self) -> list[Entry]:
        return [entry for bucket in self._buckets.values() for entry in bucket]

    def cached_blocks(self) -> Iterator[int]:
        """Walk from the root; what is not reached is missing here."""
        children: dict[int, list[Entry]] = {}
        for entry in self._entries():
            children.setdefault(entry.parent, []).append(entry)
        level = children.get(ROOT, [])
        while level:
            yield from (entry.block for entry in level)
            level = [child for entry in level for child in children.get(entry.uid, [])]

    def check(self) -> None:
        """Compare users with chains, the idle queue with users, and its order with parents."""
        entries = self._entries()
        owned = Counter((e.uid, b) for chain in self._chains.values() for e, b in chain)
        expected = Counter((e.uid, b) for e in entries for b in [e.block] * e.users + e.copies)
        if owned != expected:
            raise AssertionError("the users of a cached block disagree with the chains")
        if set(self._idle) != {entry for entry in entries if not entry.users}:
            raise AssertionError("the idle queue is not the blocks without users")
        if self._pool.num_evictable != len(self._idle):
            raise AssertionError("the blocks without users are not those without owners")
        if len(list(self.cached_blocks())) != len(entries):
            raise AssertionError("a cached block cannot be reached from the root")
        later = set(self._idle)
        by_uid = {entry.uid: entry for entry in entries}
        for entry in self._idle:
            later.discard(entry)
            parent = by_uid.get(entry.parent)
            if parent is not None and not parent.users and parent not in later:
                raise AssertionError("a block would be evicted before the blocks behind it")
