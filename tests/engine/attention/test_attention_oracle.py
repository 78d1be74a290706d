"""The oracle equals dense attention with a mask, head by head."""

import numpy as np
import pytest

OPTIONS = [
    {},
    {"window": 1},
    {"window": 20},
    {"softcap": 2.0},
    {"sinks": np.linspace(-3, 6, 8).astype(np.float32)},
    {"window": 33, "softcap": 5.0, "sinks": np.linspace(-3, 6, 8).astype(np.float32)},
]


def dense(batch, scale, window=None, softcap=None, sinks=None):
    """Attend, for each sequence, with a full score matrix and a boolean mask."""
    out = np.zeros_like(batch.q, dtype=np.float64)
    group = batch.q.shape[1] // batch.k_pool.shape[2]
    for sequence, context in enumerate(batch.seq_lens):
        begin, end = batch.cu_seqlens_q[sequence : sequence + 2]
        k, v = (np.repeat(x, group, axis=1).astype(np.float64) for x in batch.keys(sequence))
        last = np.arange(context - (end - begin), context)
        key = np.arange(context)
        seen = key <= last[:, None]
        if window is not None:
            seen &= key > last[:, None] - window
        for head in range(batch.q.shape[1]):
            scores = batch.q[begin:end, head].astype(np.float64) @ k[:, head].T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.where(seen, np.exp(scores), 0)
            total = weights.sum(axis=1) + (0 if sinks is None else np.exp(np.float64(sinks[head])))
            out[begin:end, head] = weights @ v[:, head] / total[:, None]
    return out


@pytest.mark.parametrize("options", OPTIONS)
def test_oracle_equals_dense_attention(make_batch, lengths, options):
    batch = make_batch(lengths, heads=8, kv_heads=4, head_dim=16)
    batch.q, batch.k_pool = batch.q.astype(np.float64), batch.k_pool.astype(np.float64)
    batch.v_pool = batch.v_pool.astype(np.float64)
    out, report = batch.attend("reference", scale=0.3, **options)
    np.testing.assert_allclose(out, dense(batch, 0.3, **options), rtol=1e-9, atol=1e-12)
    assert not report.stale


def test_oracle_keeps_half_precision(make_batch):
    batch = make_batch([(3, 20), (1, 4)], head_dim=16)
    wide, _ = batch.attend("reference")
    for name in ("q", "k_pool", "v_pool"):
        setattr(batch, name, getattr(batch, name).astype(np.float16))
    half, _ = batch.attend("reference")
    assert half.dtype == np.float16
    assert np.abs(half - wide).max() < 4e-3


@pytest.mark.parametrize("backend", ["gather", "gather_padded", "masked"])
@pytest.mark.parametrize("options", OPTIONS[:-1])
def test_one_call_of_mlx_for_all_requests_equals_the_oracle(make_batch, lengths, backend, options):
    """Unused slots hold numbers here: MLX multiplies a masked value by 0, which keeps a NaN."""
    batch = make_batch(lengths, heads=8, kv_heads=4, head_dim=32, poison=False)
    out, report = batch.attend(backend, **options)
    expected, _ = batch.attend("reference", **options)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-6)
    assert report.counters()[f"kernel.{backend}"] == 1


def test_cells_that_a_query_reads_for_nothing_are_counted(make_batch):
    batch = make_batch([(1, 40), (3, 10), (1, 20)], poison=False)
    counters = {
        backend: batch.attend(backend)[1].counters() for backend in ("gather_padded", "masked")
    }
    rectangle, pool = 3 * 3 * 16, 3 * 7 * 16  # three blocks in each row; all blocks and block 0
    for backend, cells in (("gather_padded", rectangle), ("masked", pool)):
        assert counters[backend]["attention.keys"] == cells
        assert counters[backend]["attention.keys_padded"] == cells - 70
