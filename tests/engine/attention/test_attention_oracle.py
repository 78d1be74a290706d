"""The oracle against attention written down differently: dense, masked, per head."""

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
    """Return attention of each sequence by a full score matrix and a boolean mask."""
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
def test_oracle_equals_dense_attention(batch, lengths, options):
    made = batch(lengths, heads=8, kv_heads=4, head_dim=16)
    made.q, made.k_pool = made.q.astype(np.float64), made.k_pool.astype(np.float64)
    made.v_pool = made.v_pool.astype(np.float64)
    out, report = made.attend("reference", scale=0.3, **options)
    np.testing.assert_allclose(out, dense(made, 0.3, **options), rtol=1e-9, atol=1e-12)
    assert not report.stale


def test_oracle_keeps_half_precision(batch):
    made = batch([(3, 20), (1, 4)], head_dim=16)
    wide, _ = made.attend("reference")
    for name in ("q", "k_pool", "v_pool"):
        setattr(made, name, getattr(made, name).astype(np.float16))
    half, _ = made.attend("reference")
    assert half.dtype == np.float16
    assert np.abs(half - wide).max() < 4e-3
