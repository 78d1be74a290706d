"""The public operation: MLX or NumPy in, MLX out, one report."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.engine.attention import paged_attention


def call(made, backend, dtype=mx.float32, convert=mx.array, **options):
    q, k_pool, v_pool = (
        convert(array) if dtype == mx.float32 else mx.array(array).astype(dtype)
        for array in (made.q, made.k_pool, made.v_pool)
    )
    return paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables=convert(made.block_tables),
        seq_lens=convert(made.seq_lens),
        cu_seqlens_q=convert(made.cu_seqlens_q),
        scale=0.2,
        backend=backend,
        **options,
    )


@pytest.mark.parametrize("convert", [mx.array, np.asarray])
def test_backends_agree(batch, lengths, convert, assert_close):
    made = batch(lengths)
    out, report = call(made, "cpu", convert=convert, window=50)
    expected, oracle = call(made, "reference", convert=convert, window=50)
    assert isinstance(out, mx.array) and out.dtype == mx.float32
    assert_close(np.array(out), np.array(expected))
    assert report.kernel in ("decode", "tiled") and oracle.kernel == "reference"


@pytest.mark.parametrize(("dtype", "error"), [(mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
def test_half_precision(batch, dtype, error):
    made = batch([(3, 20), (1, 40)])
    out, _ = call(made, "reference", dtype)
    wide, _ = call(made, "reference")
    assert out.dtype == dtype
    assert np.abs(np.array(out.astype(mx.float32)) - np.array(wide)).max() < error
    with pytest.raises(ValueError, match="on device cpu takes float32, not"):
        call(made, "cpu", dtype)


def test_bad_arguments(batch):
    made = batch([(3, 20), (1, 40)])
    with pytest.raises(ValueError, match="device=tpu: allowed are cpu, emulated, metal"):
        call(made, "tpu")
    made.v_pool = made.v_pool.astype(np.float16)
    with pytest.raises(ValueError, match="must have one dtype"):
        call(made, "cpu")
    made.q = made.q.astype(np.int32)
    with pytest.raises(ValueError, match="q must be float32, float16 or bfloat16, not"):
        call(made, "cpu")
