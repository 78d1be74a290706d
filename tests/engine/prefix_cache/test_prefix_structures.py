"""The prefix cache structures: cached, split, freed and evicted blocks."""

import pytest

from labkit.config import PrefixInsert
from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.prefix_cache.eviction import LFU, EvictionOrder, IdlePrefix
from labkit.engine.prefix_cache.hash_table import HashPrefixCache
from labkit.engine.request import Request, RequestState
from labkit.engine.sampling.sampling_params import SamplingParams

BOTH = pytest.mark.parametrize("name", ["hash", "radix"])
SIZE = 2  # tokens in a block


class Bench:
    """A manager with a prefix cache; requests are named by their tokens' letters."""

    def __init__(self, name, blocks=20, make=None, reuse_blocks=1, **options):
        self.pool = BlockPool(blocks + 1, SIZE)
        self.cache = make(self.pool) if make else prefix_cache.create(name, self.pool)
        self.manager = PagedKVCacheManager(self.pool, self.cache, reuse_blocks, **options)
        self.live = {}

    def admit(self, text, name=None):
        """Reserve for all of ``text``; return the tokens found, None if there is no room."""
        name = name or text
        state = RequestState(Request(name, tuple(map(ord, text))))
        num_cached = self.manager.reserve(state, len(text))
        if num_cached is not None:
            state.num_computed_tokens = num_cached
            self.live[name] = state
        self.check()
        return num_cached

    def compute(self, name, count=None):
        """Compute up to ``count`` tokens in all and publish them."""
        state = self.live[name]
        state.num_computed_tokens = state.num_tokens if count is None else count
        self.manager.cache_blocks(state)
        self.check()

    def end(self, name):
        self.manager.release(self.live.pop(name).request_id)
        self.check()

    def serve(self, text):
        num_cached = self.admit(text)
        self.compute(text)
        self.end(text)
        return num_cached

    def num_cached(self, text):
        """How many tokens of ``text`` are cached."""
        return SIZE * len(self.cache.match(tuple(map(ord, text)), len(text) // SIZE))

    def blocks(self, name):
        return self.manager.table(name).block_ids.tolist()

    def check(self):
        self.manager.check(set(self.live))


@BOTH
def test_only_computed_prefixes_are_cached(name):
    bench = Bench(name)
    assert bench.serve("abcdef") == 0
    assert bench.num_cached("abcdef") == bench.num_cached("abcdefgh") == 6
    assert bench.num_cached("abcdXX") == bench.num_cached("abcdeX") == 4
    assert bench.num_cached("cdef") == bench.num_cached("Xbcdef") == 0, "found in the wrong place"
    assert bench.serve("abcdXXYY") == 4
    assert bench.num_cached("abcdef") == 6 and bench.num_cached("abcdXXYY") == 8


@BOTH
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_trap_a_fully_cached_prompt_still_computes_its_last_token(name, length):
    bench = Bench(name)
    text = "abcdefgh"[:length]
    assert bench.serve(text) == 0
    assert bench.serve(text) == (length - 1) // SIZE * SIZE < length


@BOTH
def test_blocks_are_shared_while_both_requests_run(name):
    bench = Bench(name)
    bench.admit("abcdef")
    bench.compute("abcdef", 4)
    assert bench.admit("abcdXY") == 4
    assert bench.blocks("abcdXY")[:2] == bench.blocks("abcdef")[:2]
    assert bench.pool.num_used == 4
    bench.end("abcdef")
    assert bench.pool.num_used == 3, "what the other request reads was given back"
    bench.end("abcdXY")
    assert (bench.pool.num_used, bench.pool.num_evictable) == (0, 2)


@BOTH
def test_only_computed_full_blocks_are_published(name):
    bench = Bench(name)
    bench.admit("abcdef")
    assert bench.num_cached("abcdef") == 0
    bench.compute("abcdef", 3)
    assert bench.num_cached("abcdef") == 2
    bench.end("abcdef")
    assert bench.num_cached("abcdef") == 2 and bench.pool.num_cached == 1


@BOTH
def test_eviction_is_least_recently_used_first_and_tail_before_head(name):
    bench = Bench(name, blocks=6)
    bench.serve("aabbcc")
    bench.serve("xxyyzz")
    bench.serve("aabb!!")  # uses the older one again; its third block must be bought
    cached = [bench.num_cached(text) for text in ("xxyyzz", "aabbcc", "aabb!!")]
    assert cached == [6, 4, 6]
    bench.admit("1122")
    assert (bench.num_cached("xxyyzz"), bench.num_cached("aabb!!")) == (2, 6)
    bench.end("1122")
    bench.admit("334455")
    assert (bench.num_cached("xxyyzz"), bench.num_cached("aabb!!")) == (0, 6)
    assert bench.cache.num_evicted == 3 + 1


@BOTH
def test_blocks_of_a_running_request_are_never_evicted(name):
    bench = Bench(name, blocks=4)
    bench.admit("aabbcc")
    bench.compute("aabbcc")
    assert bench.admit("wwxx") is None
    assert bench.admit("aabb!!") == 4, "the blocks of a running request are shared"
    assert bench.admit("aabb??") is None
    bench.end("aabbcc")
    assert bench.num_cached("aabbcc") == 6
    assert bench.admit("aabb??") == 4  # the tail of the first is what gives way
    assert bench.num_cached("aabbcc") == 4
    with pytest.raises(ValueError, match=r"evict\(1\): the number of evictable blocks is 0"):
        bench.cache.evict(1)


@BOTH
def test_a_refused_admission_changes_nothing(name):
    bench = Bench(name, blocks=4)
    bench.serve("aabb")
    bench.admit("ww")
    # One block is free and two are evictable, but those two are the matching ones.
    before = (bench.pool.num_free, bench.pool.num_evictable, bench.manager.counters())
    assert bench.admit("aabbccdd") is None
    assert (bench.pool.num_free, bench.pool.num_evictable, bench.manager.counters()) == before


@BOTH
def test_clear_evicts_blocks_without_references(name):
    bench = Bench(name)
    bench.admit("aabbcc")
    bench.compute("aabbcc", 4)
    bench.serve("aaxxyy")
    bench.manager.clear()
    bench.check()
    assert (bench.num_cached("aabbcc"), bench.num_cached("aaxxyy")) == (4, 2)
    bench.end("aabbcc")
    bench.manager.clear()
    bench.check()
    assert bench.pool.num_free == bench.pool.capacity and bench.cache.num_evicted == 0


@BOTH
def test_reuse_is_in_multiples_of_a_chunk(name):
    bench = Bench(name, reuse_blocks=2)
    bench.serve("aabbccddee")
    assert bench.manager.reuse_tokens == 2 * SIZE
    assert bench.admit("aabbccddee") == 8
    assert bench.admit("aabbccXX") == 4
    assert bench.admit("aaXX") == 0


@BOTH
def test_counters_of_queries_hits_cached_and_evicted_blocks(name):
    bench = Bench(name, blocks=4)
    bench.serve("aabbcc")
    bench.serve("aabb!")
    bench.serve("wwxxyyzz")
    counters = bench.manager.counters()
    assert {k: v for k, v in counters.items() if k.startswith("prefix.")} == {
        "prefix.queried_tokens": 6 + 5 + 8,
        "prefix.hit_tokens": 4,
        "prefix.evicted_blocks": 3,
        "prefix.cached_blocks": 4,
    }
    assert counters[f"prefix_cache.{name}"] == 3
    bench.manager.reset_counters()
    counters = bench.manager.counters()
    assert counters[f"prefix_cache.{name}"] == 0
    assert counters["prefix.cached_blocks"] == 4
    assert not counters["prefix.hit_tokens"] + counters["prefix.evicted_blocks"]


@BOTH
def test_a_preempted_request_does_not_count_as_a_query_again(name):
    """It finds its own tokens, of which the last are no prompt tokens."""
    bench = Bench(name)
    bench.serve("aabb")
    assert bench.admit("aabbcc") == 4
    state = bench.live["aabbcc"]
    state.token_ids += map(ord, "dd")
    state.num_computed_tokens = 8
    bench.manager.grow("aabbcc", 8)
    bench.manager.cache_blocks(state)
    bench.manager.release("aabbcc")
    state.preempt()
    assert bench.manager.reserve(state, 8) == 6
    counters = bench.manager.counters()
    assert (counters["prefix.queried_tokens"], counters["prefix.hit_tokens"]) == (4 + 6, 4)


@BOTH
def test_a_request_that_takes_nothing_from_the_cache_is_no_query(name):
    bench = Bench(name)
    bench.serve("aabb")
    params = SamplingParams(prompt_logprobs=0)
    assert bench.manager.reserve(RequestState(Request("s", (97, 97, 98, 98), params)), 4) == 0
    counters = bench.manager.counters()
    assert (counters["prefix.queried_tokens"], counters["prefix.hit_tokens"]) == (4, 0)


def test_hash_leaves_block_tables_unchanged_and_caches_one_copy():
    bench = Bench("hash")
    for name in ("a", "b"):
        bench.admit("aabbcc", name)
    before = bench.manager.table("b")
    bench.compute("a", 4)
    first = bench.blocks("a")
    bench.compute("b")
    assert bench.manager.table("b") is before
    assert bench.pool.num_cached == 3
    assert bench.cache.match(tuple(map(ord, "aabb")), 2) == first[:2]
    bench.end("a")
    # The copy takes its place, so that nothing is held that b does not own.
    assert bench.cache.match(tuple(map(ord, "aabb")), 2) == bench.blocks("b")[:2]
    assert (bench.pool.num_used, bench.pool.num_evictable) == (3, 0)
    bench.end("b")
    assert bench.pool.num_evictable == 3 and bench.num_cached("aabbcc") == 6


@BOTH
def test_recomputing_an_idle_block_keeps_one_copy(name):
    bench = Bench(name)
    bench.admit("aabbcc", "late")
    bench.serve("aabbcc")
    bench.compute("late")
    assert (bench.pool.num_used, bench.pool.num_evictable, bench.pool.num_cached) == (3, 0, 3)


def test_radix_remaps_duplicates_and_gives_them_back():
    bench = Bench("radix")
    for name in ("a", "b"):
        bench.admit("aabbcc", name)
    bench.compute("a", 4)
    assert bench.pool.num_used == 6
    bench.compute("b")
    assert bench.blocks("b")[:2] == bench.blocks("a")[:2]
    assert bench.pool.num_used == 4
    bench.compute("a")
    assert bench.blocks("a") == bench.blocks("b")
    assert bench.pool.num_used == 3


def test_radix_grows_a_leaf_splits_a_node_and_cuts_a_leaf_from_its_end():
    bench = Bench("radix", blocks=6)

    def spans():
        return sorted("".join(chr(t[0]) for t in node.tokens) for node in bench.cache.nodes())

    bench.admit("aabbccdd")
    for count in (2, 4, 8):
        bench.compute("aabbccdd", count)
        assert len(spans()) == 1, "a leaf of one request grows"
    bench.end("aabbccdd")
    assert bench.num_cached("aabbXX") == 4 and spans() == ["abcd"], "a match splits nothing"
    bench.serve("aabbXX")
    assert spans() == ["X", "ab", "cd"]
    bench.serve("112233")  # one block is free, two must be bought
    assert spans() == ["123", "X", "ab"]
    bench.serve("4455")
    assert spans() == ["123", "45", "a"]


def collide(bits):
    return lambda pool: HashPrefixCache(pool, digest=lambda key: hash(key) % (1 << bits))


@pytest.mark.parametrize("bits", [0, 2])
def test_trap_hash_collision(bits):
    bench = Bench("hash", make=collide(bits))
    texts = ["aabbcc", "aabbdd", "ccbbaa", "bbaa", "aaaaaa"]
    for text in texts:
        bench.serve(text)
    assert [bench.num_cached(text) for text in texts] == [len(text) for text in texts]
    assert bench.num_cached("ccdd") == 2 and bench.num_cached("ddcc") == 0


@BOTH
def test_trap_evicting_parents_first_would_strand_children(name):
    """A copy's child hangs under a parent that its own request does not read."""
    bench = Bench(name, blocks=7)
    bench.admit("aabb", "first")
    bench.admit("aaXXYY", "second")
    bench.compute("first")
    bench.end("first")
    bench.compute("second")  # "aa" is the first's
    bench.admit("1122")
    assert bench.num_cached("aaXXYY") == 6, "the parent of a block in use is in use"
    bench.end("second")
    bench.end("1122")
    for text, left in (("334455", 6), ("66778899", 4), ("!!", 2)):
        bench.admit(text)
        assert bench.num_cached("aaXXYY") <= left
        bench.check()


@BOTH
def test_check_reports_broken_invariants(name):
    bench = Bench(name)
    bench.serve("aabbcc")
    bench.serve("aaxx")
    idle = bench.cache._idle
    first = next(iter(idle))
    idle.discard(first)
    idle.add(first, IdlePrefix(2, 1, 9), 0.0)
    with pytest.raises(AssertionError, match="would be evicted before"):
        bench.cache.check()
    bench = Bench(name)
    bench.serve("aabbcc")
    bench.pool.evict([next(bench.cache.cached_blocks())])
    with pytest.raises(AssertionError, match=r"leaked or listed twice|cached blocks disagree"):
        bench.check()


@pytest.mark.parametrize("name", ["hash", "radix"])
def test_a_prefix_is_referenced_and_locked_at_once(name):
    pool = BlockPool(4, 2)
    cache, tokens, blocks = prefix_cache.create(name, pool), (1, 2, 3, 4), pool.allocate(2)
    cache.acquire("a", tokens, [])
    cache.cache_blocks("a", tokens, blocks)
    cache.release("a", blocks)
    assert pool.num_evictable == 2
    cache.acquire("b", tokens, cache.match(tokens, 2))
    with pytest.raises(ValueError, match="evictable blocks is 0"):
        cache.evict(1)
    cache.release("b", blocks)
    cache.evict(2)
    assert pool.num_free == 3


class ShortestFirst:
    name = "shortest_first"

    def eviction_key(self, prefix):
        return prefix.num_tokens


class Failing:
    name = "failing"

    def eviction_key(self, prefix):
        raise ZeroDivisionError


@BOTH
def test_a_policy_that_fails_is_heard_of_once_and_memory_is_released(name):
    bench = Bench(name, 6, make=lambda pool: prefix_cache.create(name, pool, Failing()))
    with pytest.raises(ZeroDivisionError):
        bench.serve("aabbcc")
    bench.check()
    bench.serve("ddee")
    bench.cache.clear()
    assert bench.pool.num_free == 6


@BOTH
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, {"aabbcc": 0, "ddee": 4, "ff": 2}),  # lru: aabbcc was served first
        (LFU, {"aabbcc": 6, "ddee": 0, "ff": 2}),  # ff was served after ddee
        (ShortestFirst(), {"aabbcc": 6, "ddee": 0, "ff": 0}),
    ],
)
def test_a_policy_decides_what_is_evicted_and_prefixes_go_from_their_ends(name, policy, kept):
    bench = Bench(name, 6, make=lambda pool: prefix_cache.create(name, pool, policy))
    for text in ("aabbcc", "aabbcc", "ddee", "ff"):
        bench.serve(text)
    need = {0: 3, 6: 2 if kept["ff"] else 3}[kept["aabbcc"]]
    bench.admit("xxyyzz"[: 2 * need])
    assert {text: bench.num_cached(text) for text in kept} == kept
    counters = bench.manager.counters()
    assert counters[f"prefix_eviction.{policy.name if policy else 'lru'}"] == need


@BOTH
def test_a_shared_beginning_stays_as_long_as_what_is_behind_it(name):
    bench = Bench(name, 6, make=lambda pool: prefix_cache.create(name, pool, ShortestFirst()))
    for text in ("aabbcc", "aadd"):  # in the radix tree, the second splits the first one's node
        bench.serve(text)
    bench.admit("xxyyzz")
    assert bench.num_cached("aabbcc") == 6 and bench.num_cached("aadd") == 2


@BOTH
def test_what_one_request_appended_has_one_use_whatever_its_prefix_has(name):
    uses = {}

    class Spy:
        name = "spy"

        def eviction_key(self, prefix):
            uses[prefix.num_tokens] = prefix.num_uses
            return prefix.num_uses

    bench = Bench(name, make=lambda pool: prefix_cache.create(name, pool, Spy()))
    for turn in ("aabb", "aabbcc!", "aabbccdd!"):
        bench.serve(turn)
    assert [uses[length] for length in (4, 6, 8)] == [3, 2, 1]


def test_an_order_of_eviction_forgets_entries_that_are_no_longer_idle():
    order = EvictionOrder(LFU)
    order.add("a", IdlePrefix(2, 1, 1), 0.0)
    for uses in range(2, 300):
        order.discard("b")
        order.add("b", IdlePrefix(2, uses, uses), 0.0)
    assert len(order) == 2 and list(order) == ["a", "b"] and len(order._heap) < 100
    order.discard("a")
    assert order.first == "b" and order.key_of("b") == 299
    assert order.add("a", IdlePrefix(2, 1, 1), 400.0) == 400 and order.first == "b"


@BOTH
def test_blocks_cached_at_the_end_are_not_found_before(name):
    bench = Bench(name, insert=PrefixInsert.finish)
    bench.admit("shared+a")
    bench.compute("shared+a")
    assert bench.num_cached("shared+a") == 0 and bench.serve("shared+b") == 0
    bench.end("shared+a")
    assert bench.num_cached("shared+a") == bench.num_cached("shared+b") == 8
    assert bench.manager.counters()["prefix_insert.finish"] == 2
    assert bench.pool.num_free == 20 - 5  # three shared blocks and two ends, once each


def test_a_queue_of_free_blocks_takes_turns_and_a_stack_does_not():
    for fifo, expected in ((False, [1, 2, 1, 2]), (True, [1, 2, 3, 4])):
        pool = BlockPool(6, SIZE, fifo=fifo)
        taken = pool.allocate(2)
        pool.free(taken)
        assert taken + pool.allocate(2) == expected
