"""The CPU kernels equal the oracle within rounding, and each other bit for bit."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine import attention

SINKS = np.linspace(-3, 6, 8).astype(np.float32)
OPTIONS = [
    {},
    {"window": 1},
    {"window": 20},
    {"window": 100},
    {"softcap": 2.0},
    {"sinks": SINKS},
    {"window": 33, "softcap": 5.0, "sinks": SINKS},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_kernels_equal_the_oracle(make_batch, lengths, options, assert_close):
    batch = make_batch(lengths)
    out, report = batch.attend(**options)
    expected, _ = batch.attend("reference", **options)
    assert_close(out, expected)
    assert not report.stale
    assert report.kernel == ("tiled" if len(batch.q) > len(lengths) else "decode")


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1), (6, 2)])
def test_head_sizes_and_groups(make_batch, head_dim, heads, assert_close):
    for lengths in ([(1, 70), (1, 9)], [(40, 70), (1, 9)]):
        batch = make_batch(lengths, heads=heads[0], kv_heads=heads[1], head_dim=head_dim)
        assert_close(batch.attend()[0], batch.attend("reference")[0])


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_contexts_around_block_and_tile_boundaries(make_batch, block_size, assert_close):
    contexts = sorted({n + d for n in (8, 16, 32, 64, 96, 128) for d in (-1, 0, 1)})
    for lengths in ([(1, n) for n in contexts], [(min(n, 35), n) for n in contexts]):
        batch = make_batch(lengths, block_size=block_size, heads=4, head_dim=32)
        assert_close(batch.attend()[0], batch.attend("reference")[0])


def test_block_size_does_not_change_a_bit(make_batch):
    lengths = [(1, 100), (40, 70), (3, 3)]
    outs = []
    for block_size in (8, 16, 32, 64):
        batch = make_batch(lengths, block_size=block_size, seed=1)
        source = make_batch(lengths, block_size=8, seed=2)
        batch.q = source.q
        for sequence, context in enumerate(batch.seq_lens):
            for pool, rows in zip((batch.k_pool, batch.v_pool), source.keys(sequence), strict=True):
                for i in range(context):
                    pool[batch.block_tables[sequence, i // block_size], i % block_size] = rows[i]
        outs.append(batch.attend()[0])
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("shift", [-40.0, -300.0, 300.0])
@pytest.mark.parametrize("window", [None, 5, 64, 70])
def test_very_negative_logits(make_batch, shift, window, assert_close):
    batch = make_batch([(1, 300), (40, 200)], shift=shift)
    out, _ = batch.attend(scale=1.0, window=window)
    expected, _ = batch.attend("reference", scale=1.0, window=window)
    assert np.abs(expected).max() > 0.1
    assert_close(out, expected, largest_logit=abs(shift) + 30)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [None, 10])
def test_masked_positions_do_not_leak(make_batch, poison, window, assert_close):
    batch = make_batch([(60, 130)])
    clean, _ = batch.attend("reference", window=window)
    for position in (75, 100, 129):
        block, offset = batch.block_tables[0, position // 16], position % 16
        batch.k_pool[block, offset] = poison
        batch.v_pool[block, offset] = poison
    out, _ = batch.attend(window=window)
    # Query i is at position 70 + i and sees the keys up to it.
    sees_poison = np.zeros(60, dtype=bool)
    for position in (75, 100, 129):
        last = 60 if window is None else position - 70 + window
        sees_poison[position - 70 : last] = True
    assert_close(out[~sees_poison], clean[~sees_poison])
    assert np.isnan(out[sees_poison]).all(axis=(1, 2)).all()


def test_both_kernels_and_all_batches_give_the_same_bits(make_batch):
    """A row's bits depend only on its query and its keys."""
    batch = make_batch([(1, 130), (64, 130), (1, 77), (5, 9)], heads=6, kv_heads=2)
    for options in ({}, {"window": 40}, {"softcap": 3.0}, {"sinks": SINKS[:6]}):
        whole, report = batch.attend(**options)
        assert report.kernel == "tiled"
        for sequence in range(4):
            begin, end = batch.cu_seqlens_q[sequence : sequence + 2]
            for i in range(begin, end, 7):
                alone = make_batch([(1, 1)], heads=6, kv_heads=2)
                alone.q, alone.k_pool, alone.v_pool = batch.q[i : i + 1], batch.k_pool, batch.v_pool
                alone.block_tables = batch.block_tables[sequence : sequence + 1]
                context = batch.seq_lens[sequence] - (end - i) + 1
                alone.seq_lens = np.array([context], dtype=np.int32)
                row, report = alone.attend(**options)
                assert report.kernel == "decode"
                assert np.array_equal(row[0], whole[i])


def test_thread_count_does_not_change_a_bit(make_batch, lengths):
    batch = make_batch(lengths)
    all_threads, _ = batch.attend()
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one_thread, report = batch.attend()
    finally:
        numba.set_num_threads(threads)
    assert np.array_equal(all_threads, one_thread)
    assert not report.stale


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 7, 64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_any_batch(make_batch, assert_close, lengths, window, seed):
    batch = make_batch([(q, q + past) for q, past in lengths], heads=4, head_dim=16, seed=seed)
    out, report = batch.attend(window=window)
    expected, _ = batch.attend("reference", window=window)
    assert_close(out, expected)
    mapped, _ = batch.attend(resolver="seq_map", window=window)
    assert np.array_equal(out, mapped)
    assert not report.stale


def test_forward_writes_before_it_attends(make_batch):
    lengths = [(3, 20), (1, 4)]
    random = np.random.default_rng(5)
    k, v = (random.standard_normal((4, 2, 64)).astype(np.float32) for _ in range(2))
    outs, batches = [], []
    for backend in ("fused", "reference"):
        batch = make_batch(lengths, poison=False)
        before = batch.k_pool.copy(), batch.v_pool.copy()
        owner = attention.create(backend=backend)
        outs.append(batch.forward(owner, batch.plan(owner), k, v)[0])
        slots = [(batch.block_tables[0, 1], i) for i in (1, 2, 3)] + [(batch.block_tables[1, 0], 3)]
        for new, pool, old in ((k, batch.k_pool, before[0]), (v, batch.v_pool, before[1])):
            for token, slot in enumerate(slots):
                old[slot] = new[token]
            assert np.array_equal(pool, old)
        batches.append(batch)
    assert np.array_equal(outs[0], batches[0].attend()[0])
    assert np.abs(outs[0] - outs[1]).max() < 1e-5


def test_the_tiled_kernel_counts_the_blocks_of_each_tile(make_batch):
    """Whole blocks of 16 up to the last query's position, from the first that any query sees."""
    batch = make_batch([(8, 320), (3, 33)], heads=2, kv_heads=1)
    for options, visited in (({}, 20 + 3), ({"window": 9}, 1 + 2), ({"window": 16}, 2 + 3)):
        report = batch.attend(**options)[1]
        assert (report.kernel, report.kv_blocks_visited) == ("tiled", visited), options


def test_blocks_outside_the_window_are_not_visited(make_batch):
    batch = make_batch([(1, 320)], heads=2, kv_heads=1)
    assert batch.attend()[1].kv_blocks_visited == 20
    assert batch.attend(window=16)[1].kv_blocks_visited == 1
    assert batch.attend(window=17)[1].kv_blocks_visited == 2
    batch.k_pool[batch.block_tables[0, :19]] = np.nan
    batch.v_pool[batch.block_tables[0, :19]] = np.nan
    assert np.isfinite(batch.attend(window=16)[0]).all()
