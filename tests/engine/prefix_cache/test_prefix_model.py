"""Random histories of requests, checked against a model of every KV slot's content.

The oracle writes, for every token computed, the whole prefix up to it into the slot that
the request's block table names. A cached block is right if its slots hold the prefixes of
the request that is given it; that is all that attention needs.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.prefix_cache.hash_table import HashPrefixCache
from labkit.engine.request import Request, RequestState

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Unordered:
    """A policy whose keys rise and fall, for prefixes and for what is behind them."""

    name = "unordered"

    def eviction_key(self, prefix):
        return (7 * prefix.num_tokens + 5 * prefix.num_uses + 3 * prefix.last_used) % 11


CACHES = {
    "none": lambda pool: prefix_cache.create("none", pool),
    "hash": lambda pool: prefix_cache.create("hash", pool),
    "radix": lambda pool: prefix_cache.create("radix", pool),
    "hash, by a policy": lambda pool: prefix_cache.create("hash", pool, Unordered()),
    "radix, by a policy": lambda pool: prefix_cache.create("radix", pool, Unordered()),
    "2-bit hash": lambda pool: HashPrefixCache(pool, digest=lambda key: hash(key) % 4),
}


class PrefixMachine(RuleBasedStateMachine):
    """Admit, compute, sample, end, preempt and clear, in a pool of any size."""

    @initialize(
        name=st.sampled_from(sorted(CACHES)),
        blocks=st.integers(3, 16) | st.just(300),
        reuse=st.sampled_from([1, 1, 2]),
    )
    def start(self, name, blocks, reuse):
        self.pool = BlockPool(blocks + 1, SIZE)
        self.manager = PagedKVCacheManager(self.pool, CACHES[name](self.pool), reuse)
        self.name, self.reuse, self.roomy = name, reuse, blocks == 300
        self.slots, self.running, self.waiting, self.ended = {}, {}, [], 0
        self.known = set()  # prefixes of full blocks ever published and not cleared
        self.admitted = 0

    @rule(tokens=TOKENS)
    def submit(self, tokens):
        self.waiting.append(RequestState(Request(f"r{self.ended}", tuple(tokens))))
        self.ended += 1

    @precondition(lambda self: self.waiting)
    @rule(room=st.integers(0, 5))
    def admit(self, room):
        """Reserve for the request's tokens and ``room`` more, as a reservation would."""
        state = self.waiting.pop(0)
        wanted = state.num_tokens + room
        can_be_had = self.pool.num_free + self.pool.num_evictable
        num_cached = self.manager.reserve(state, wanted)
        if num_cached is None:
            assert self.pool.blocks_for(wanted) > can_be_had - self.idle_prefix(state)
            return
        assert num_cached % (SIZE * self.reuse) == 0 and num_cached < state.num_tokens
        self.check_contents(state, num_cached)
        if self.name == "none":
            assert num_cached == 0
        elif self.roomy:
            assert num_cached == self.longest_known(state)
        state.num_computed_tokens = num_cached
        self.running[state.request_id] = (state, wanted)
        self.admitted += 1

    def idle_prefix(self, state):
        """Blocks that the request could have hit. They are free while shared."""
        return state.num_tokens // SIZE

    def longest_known(self, state):
        unit, num_cached = SIZE * self.reuse, 0
        for stop in range(unit, state.num_tokens, unit):
            if tuple(state.token_ids[:stop]) in self.known:
                num_cached = stop
        return num_cached

    def slot(self, state, position):
        table = self.manager.table(state.request_id).block_ids
        return int(table[position // SIZE]), position % SIZE

    def check_contents(self, state, count):
        for position in range(count):
            stored = self.slots.get(self.slot(state, position))
            assert stored == tuple(state.token_ids[: position + 1]), "another prefix is read"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 12))
    def compute(self, data, count):
        """Write and publish; a request that has caught up gets another token first."""
        state, room = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if state.num_computed_tokens == state.num_tokens:
            if state.num_tokens == room:
                return
            state.token_ids.append(data.draw(st.integers(0, 1)))
        start = state.num_computed_tokens
        stop = min(state.num_tokens, start + count)
        for position in range(start, stop):
            block, offset = self.slot(state, position)
            assert self.pool._ref_cnt[block] == 1 and not self.pool._cached[block], (
                "a block is written that others may read"
            )
            self.slots[block, offset] = tuple(state.token_ids[: position + 1])
        state.num_computed_tokens = stop
        self.manager.cache_blocks(state)
        for end in range(SIZE, stop + 1, SIZE):
            self.known.add(tuple(state.token_ids[:end]))
        self.check_contents(state, stop)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), resubmit=st.booleans())
    def end(self, data, resubmit):
        """Finish, abort or preempt: the same release."""
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        state, _ = self.running.pop(request_id)
        self.manager.release(request_id)
        if resubmit:
            state.num_computed_tokens = 0
            self.waiting.append(state)

    @rule()
    def clear(self):
        self.manager.clear()
        self.known = {
            tuple(state.token_ids[:end])
            for state, _ in self.running.values()
            for end in range(SIZE, state.num_computed_tokens + 1, SIZE)
        }

    @invariant()
    def books_balance(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check(set(self.running))
        for state, _ in self.running.values():
            self.check_contents(state, state.num_computed_tokens)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.running):
            self.running.pop(request_id)
            self.manager.release(request_id)
        self.books_balance()
        assert self.pool.num_used == 0
        self.manager.clear()
        assert self.pool.num_free == self.pool.capacity
        self.books_balance()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
