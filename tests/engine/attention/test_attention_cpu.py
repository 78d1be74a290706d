"""The CPU kernels against the oracle, bit for bit among themselves."""

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
def test_kernels_equal_the_oracle(batch, lengths, options, assert_close):
    made = batch(lengths)
    out, report = made.attend(**options)
    expected, _ = made.attend("reference", **options)
    assert_close(out, expected)
    assert not report.stale
    assert report.kernel == ("tiled" if len(made.q) > len(lengths) else "decode")


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1), (6, 2)])
def test_head_sizes_and_groups(batch, head_dim, heads, assert_close):
    for lengths in ([(1, 70), (1, 9)], [(40, 70), (1, 9)]):
        made = batch(lengths, heads=heads[0], kv_heads=heads[1], head_dim=head_dim)
        assert_close(made.attend()[0], made.attend("reference")[0])


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_contexts_around_block_and_tile_boundaries(batch, block_size, assert_close):
    contexts = sorted({n + d for n in (8, 16, 32, 64, 96, 128) for d in (-1, 0, 1)})
    for lengths in ([(1, n) for n in contexts], [(min(n, 35), n) for n in contexts]):
        made = batch(lengths, block_size=block_size, heads=4, head_dim=32)
        assert_close(made.attend()[0], made.attend("reference")[0])


def test_block_size_does_not_change_a_bit(batch):
    lengths = [(1, 100), (40, 70), (3, 3)]
    outs = []
    for block_size in (8, 16, 32):
        made = batch(lengths, block_size=block_size, seed=1)
        source = batch(lengths, block_size=8, seed=2)
        made.q = source.q
        for sequence, context in enumerate(made.seq_lens):
            for pool, rows in zip((made.k_pool, made.v_pool), source.keys(sequence), strict=True):
                for i in range(context):
                    pool[made.block_tables[sequence, i // block_size], i % block_size] = rows[i]
        outs.append(made.attend()[0])
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(outs[0], outs[2])


@pytest.mark.parametrize("shift", [-40.0, -300.0, 300.0])
@pytest.mark.parametrize("window", [None, 5, 64, 70])
def test_very_negative_logits(batch, shift, window, assert_close):
    made = batch([(1, 300), (40, 200)], shift=shift)
    out, _ = made.attend(scale=1.0, window=window)
    expected, _ = made.attend("reference", scale=1.0, window=window)
    assert np.abs(expected).max() > 0.1
    assert_close(out, expected, largest_logit=abs(shift) + 30)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [None, 10])
def test_masked_positions_do_not_leak(batch, poison, window, assert_close):
    made = batch([(60, 130)])
    clean, _ = made.attend("reference", window=window)
    for position in (75, 100, 129):
        block, offset = made.block_tables[0, position // 16], position % 16
        made.k_pool[block, offset] = poison
        made.v_pool[block, offset] = poison
    out, _ = made.attend(window=window)
    # Query i stands at position 70 + i and sees up to there.
    sees = np.zeros(60, dtype=bool)
    for position in (75, 100, 129):
        last = 60 if window is None else position - 70 + window
        sees[position - 70 : last] = True
    assert_close(out[~sees], clean[~sees])
    assert np.isnan(out[sees]).all(axis=(1, 2)).all()


def test_both_kernels_and_all_batches_give_the_same_bits(batch):
    """A row's bits depend on its query and keys alone."""
    made = batch([(1, 130), (64, 130), (1, 77), (5, 9)], heads=6, kv_heads=2)
    for options in ({}, {"window": 40}, {"softcap": 3.0}, {"sinks": SINKS[:6]}):
        whole, report = made.attend(**options)
        assert report.kernel == "tiled"
        for sequence in range(4):
            begin, end = made.cu_seqlens_q[sequence : sequence + 2]
            for i in range(begin, end, 7):
                alone = batch([(1, 1)], heads=6, kv_heads=2)
                alone.q, alone.k_pool, alone.v_pool = made.q[i : i + 1], made.k_pool, made.v_pool
                alone.block_tables = made.block_tables[sequence : sequence + 1]
                context = made.seq_lens[sequence] - (end - i) + 1
                alone.seq_lens = np.array([context], dtype=np.int32)
                row, report = alone.attend(**options)
                assert report.kernel == "decode"
                assert np.array_equal(row[0], whole[i])


def test_thread_count_does_not_change_a_bit(batch, lengths):
    made = batch(lengths)
    many, _ = made.attend()
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one, report = made.attend()
    finally:
        numba.set_num_threads(threads)
    assert np.array_equal(many, one)
    assert not report.stale


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 7, 64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_any_batch(batch, assert_close, lengths, window, seed):
    made = batch([(q, q + past) for q, past in lengths], heads=4, head_dim=16, seed=seed)
    out, report = made.attend(window=window)
    expected, _ = made.attend("reference", window=window)
    assert_close(out, expected)
    mapped, _ = made.attend(resolver="seq_map", window=window)
    assert np.array_equal(out, mapped)
    assert not report.stale


def test_forward_writes_before_it_attends(batch):
    lengths = [(3, 20), (1, 4)]
    random = np.random.default_rng(5)
    k, v = (random.standard_normal((4, 2, 64)).astype(np.float32) for _ in range(2))
    outs, pools = [], []
    for backend in ("fused", "reference"):
        made = batch(lengths, poison=False)
        before = made.k_pool.copy(), made.v_pool.copy()
        owner = attention.create(backend=backend)
        outs.append(made.forward(owner, made.plan(owner), k, v)[0])
        slots = [(made.block_tables[0, 1], i) for i in (1, 2, 3)] + [(made.block_tables[1, 0], 3)]
        for new, pool, old in ((k, made.k_pool, before[0]), (v, made.v_pool, before[1])):
            for token, slot in enumerate(slots):
                old[slot] = new[token]
            assert np.array_equal(pool, old)
        pools.append(made)
    assert np.array_equal(outs[0], pools[0].attend()[0])
    assert np.abs(outs[0] - outs[1]).max() < 1e-5


def test_blocks_outside_the_window_are_not_visited(batch):
    made = batch([(1, 320)], heads=2, kv_heads=1)
    assert made.attend()[1].kv_blocks_visited == 20
    assert made.attend(window=16)[1].kv_blocks_visited == 1
    assert made.attend(window=17)[1].kv_blocks_visited == 2
    made.k_pool[made.block_tables[0, :19]] = np.nan
    made.v_pool[made.block_tables[0, :19]] = np.nan
    assert np.isfinite(made.attend(window=16)[0]).all()
