"""``engine.prefix_eviction``: which cached blocks are evicted first when memory runs out.

A policy gives every cached prefix a number when its last request has ended. The smallest is evicted
first, and equal numbers in the order in which they were released. A prefix is evicted from its end,
so its number is raised to the largest number of what is cached behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Generic, TypeVar

from labkit.config import is_class_path
from labkit.engine import user_classes
from labkit.engine.engine_protocol import EngineError

Entry = TypeVar("Entry")
MIN_STALE = 64  # entries of the heap that are not worth rebuilding it


@dataclass(frozen=True, slots=True)
class IdlePrefix:
    """A cached prefix that no request uses.

    ``num_tokens`` is its length from the first token of the sequence. ``num_uses`` is the number of
    requests that computed or reused its last block. ``last_used`` counts all requests that had
    ended when the last of these did.
    """

    num_tokens: int
    num_uses: int
    last_used: int


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """An order of eviction: the prefix with the smallest ``eviction_key``, a finite number, first.

    A user's class has these attributes.
    """

    name: str
    eviction_key: Callable[[IdlePrefix], float]


LRU = EvictionPolicy("lru", attrgetter("last_used"))  # the prefix whose last request ended first
# The prefix that the fewest requests have used, as SGLang's radix cache can.
LFU = EvictionPolicy("lfu", attrgetter("num_uses"))


def create(name: str) -> EvictionPolicy:
    """Return the policy of ``engine.prefix_eviction``; raise ``EngineError`` if it is unusable."""
    if not is_class_path(name):
        return LFU if name == "lfu" else LRU
    key = "engine.prefix_eviction"
    try:
        own: EvictionPolicy = user_classes.create_plugin(key, name, ("eviction_key",))
    except ValueError as error:
        raise EngineError(str(error)) from error
    mistake = user_classes.finite_number_mistake
    user_classes.guard_method(own, f"{key}={name}", "eviction_key", mistake)
    return own


class EvictionOrder(Generic[Entry]):
    """The idle entries of a prefix cache, in the order of eviction.

    If the policy, a user's class, fails, the memory is released all the same: the entries to come
    are ordered by their release, and :meth:`raise_failure` raises the exception.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.name = policy.name
        self._key = policy.eviction_key
        self._failure: Exception | None = None
        self._places: dict[Entry, tuple[float, int]] = {}
        # Entries that are no longer idle stay in the heap until they reach its top.
        self._heap: list[tuple[float, int, Entry]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the idle entries, the first to be evicted first."""
        return iter(sorted(self._places, key=lambda entry: self._places[entry]))

    @property
    def first(self) -> Entry:
        """The entry to be evicted first; there must be one."""
        while self._places.get((top := self._heap[0])[2]) != top[:2]:
            heappop(self._heap)
        return self._heap[0][2]

    def key_of(self, entry: Entry) -> float:
        """Return the key of an entry; minus infinity if it is not idle."""
        return self._places.get(entry, (-math.inf,))[0]

    def add(self, entry: Entry, prefix: IdlePrefix, floor: float) -> float:
        """Add an entry that became idle, and return its key, which is at least ``floor``."""
        key = floor
        try:
            key = max(self._key(prefix), floor)
        except Exception as error:
            self._failure, self._key = error, lambda prefix: -math.inf
        self._num_added += 1
        self._places[entry] = key, self._num_added
        heappush(self._heap, (key, self._num_added, entry))
        if len(self._heap) > MIN_STALE + 2 * len(self._places):
            self._heap = [(*place, one) for one, place in self._places.items()]
            heapify(self._heap)
        return key

    def raise_failure(self) -> None:
        """Raise the exception of the policy, if it failed since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def discard(self, entry: Entry) -> None:
        self._places.pop(entry, None)
