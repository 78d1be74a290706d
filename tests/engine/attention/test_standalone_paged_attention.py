"""The public operation takes MLX or NumPy arrays, and returns an MLX array and one report."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.engine.attention import paged_attention


def call(batch, backend, dtype=mx.float32, convert=mx.array, **options):
    q, k_pool, v_pool = (
        convert(array) if dtype == mx.float32 else mx.array(array).astype(dtype)
        for array in (batch.q, batch.k_pool, batch.v_pool)
    )
    return paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables=convert(batch.block_tables),
        seq_lens=convert(batch.seq_lens),
        cu_seqlens_q=convert(batch.cu_seqlens_q),
        scale=0.2,
        backend=backend,
        **options,
    )


@pytest.mark.parametrize("convert", [mx.array, np.asarray])
def test_backends_agree(make_batch, lengths, convert, assert_close):
    batch = make_batch(lengths)
    out, report = call(batch, "cpu", convert=convert, window=50)
    expected, oracle = call(batch, "reference", convert=convert, window=50)
    assert isinstance(out, mx.array) and out.dtype == mx.float32
    assert_close(np.array(out), np.array(expected))
    assert report.kernel in ("decode", "tiled") and oracle.kernel == "reference"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("dtype", "error"), [(mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
def test_half_precision(make_batch, dtype, error, backend):
    batch = make_batch([(3, 20), (1, 40)])
    out, _ = call(batch, backend, dtype)
    wide, _ = call(batch, "reference")
    assert out.dtype == dtype
    assert np.abs(np.array(out.astype(mx.float32)) - np.array(wide)).max() < error


@pytest.mark.parametrize("split_kv", ["auto", 2])
def test_the_reference_takes_a_split_which_changes_only_how_sums_are_rounded(make_batch, split_kv):
    batch = make_batch([(3, 20), (1, 40)])
    out, _ = call(batch, "reference", split_kv=split_kv)
    assert np.array_equal(np.array(out), np.array(call(batch, "reference")[0]))
    with pytest.raises(ValueError, match="split_kv=0: must be off, auto or 1 to 1024"):
        call(batch, "reference", split_kv=0)


def test_bad_arguments(make_batch):
    batch = make_batch([(3, 20), (1, 40)])
    with pytest.raises(ValueError, match="device=tpu: must be one of: cpu, emulated, metal"):
        call(batch, "tpu")
    batch.v_pool = batch.v_pool.astype(np.float16)
    with pytest.raises(ValueError, match="must have the same dtype"):
        call(batch, "cpu")
    batch.q = batch.q.astype(np.int32)
    with pytest.raises(ValueError, match="q must be float32, float16 or bfloat16, not"):
        call(batch, "cpu")
