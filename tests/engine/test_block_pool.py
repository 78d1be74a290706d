"""The pool of KV blocks: references, cached blocks, and its own check."""

import pytest

from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import Request, RequestState


def state(request_id):
    return RequestState(Request(request_id, (1, 2, 3)))


def test_the_null_block_is_never_allocated():
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_allocating_too_much_changes_nothing():
    pool = BlockPool(4, 4)
    with pytest.raises(ValueError, match="the number of free blocks is 3"):
        pool.allocate(4)
    assert pool.num_free == 3 and pool.allocated == 0


def test_freeing_twice_is_refused():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(blocks)


def test_blocks_freed_last_are_allocated_first():
    pool = BlockPool(100, 4)
    first = pool.allocate(3)
    pool.free(first)
    assert pool.allocate(3) == first


def test_counters_and_peak():
    pool = BlockPool(10, 4)
    blocks = pool.allocate(6)
    pool.free(blocks[:4])
    assert (pool.allocated, pool.freed, pool.peak_used) == (6, 4, 6)
    pool.reset_counters()
    assert (pool.allocated, pool.freed, pool.peak_used) == (0, 0, 2)


def test_check_reports_a_leaked_block_and_a_missing_reference():
    pool = BlockPool(6, 4)
    blocks = pool.allocate(3)
    pool.check([blocks])
    with pytest.raises(AssertionError, match="leaked or listed twice"):
        pool.check([blocks[:2]])
    with pytest.raises(AssertionError, match="reference counts disagree"):
        pool.check([blocks, blocks[:1]])


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_blocks_for_tokens(tokens, blocks):
    cache = PagedKVCacheManager(BlockPool(4, 8))
    assert cache.pool.blocks_for(tokens) == blocks
    assert cache.reserve(state("a"), tokens) == 0
    assert len(cache.table("a")) == blocks


def test_release_is_idempotent_and_reserve_is_all_or_nothing():
    cache = PagedKVCacheManager(BlockPool(4, 8))
    assert cache.reserve(state("a"), 16) == 0
    assert cache.reserve(state("b"), 16) is None
    cache.check({"a"})
    cache.release("a")
    cache.release("a")
    cache.check(set())
    assert cache.reserve(state("b"), 24) == 0


def test_a_shared_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.touch(blocks[:1])
    pool.free(blocks)
    assert (pool.num_used, pool.num_free) == (1, 2)
    pool.check([blocks[:1]])
    pool.free(blocks[:1])
    assert pool.num_free == 3
    with pytest.raises(ValueError, match=r"touch: block \d is free"):
        pool.touch(blocks)


def test_a_cached_block_without_references_is_evictable_until_it_is_evicted():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    pool.cache(blocks[:2])
    pool.free(blocks)
    assert (pool.num_used, pool.num_evictable, pool.num_free) == (0, 2, 1)
    assert pool.count_evictable(blocks) == 2
    pool.check([], blocks[:2])
    pool.touch(blocks[:1])
    assert (pool.num_used, pool.num_evictable) == (1, 1)
    pool.evict(blocks[:2])  # one is still in use, one is free at once
    assert (pool.num_used, pool.num_evictable, pool.num_free) == (1, 0, 2)
    pool.check([blocks[:1]])
    with pytest.raises(ValueError, match="is not cached"):
        pool.evict(blocks[:1])
    with pytest.raises(ValueError, match="cached already or not in use"):
        pool.cache(blocks[2:])


def test_check_reports_a_wrong_reference_count_and_a_forgotten_block():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    pool.touch(blocks[:1])
    with pytest.raises(AssertionError, match="reference counts disagree"):
        pool.check([blocks])
    pool.cache(blocks[:1])
    pool.free(blocks)
    with pytest.raises(AssertionError, match="cached blocks disagree"):
        pool.check([blocks[:1]])
