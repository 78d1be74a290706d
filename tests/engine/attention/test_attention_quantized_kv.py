"""Quantised KV pools: the numbers are MLX's, and attention reads exactly those."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.cpu.precision import kv_dtypes, kv_quantization_reference
from labkit.engine import attention
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.paged import verify_quantised

KINDS = tuple(kv_dtypes.QUANTIZED_BITS)
# The kernels compile in seconds per type, so fast tests of all kernels cover one of them.
KERNEL_KINDS = ["int8", pytest.param("int4", marks=pytest.mark.slow)]
SINKS = np.random.default_rng(4).standard_normal(8).astype(np.float32)


def special_rows():
    """Return rows of two groups: random, of one sign, of few numbers, tiny, huge, and zeros."""
    rows = np.random.default_rng(0).standard_normal((64, 128), np.float32)
    rows[1], rows[2] = np.abs(rows[1]), -np.abs(rows[2])
    rows[3], rows[4], rows[5, :64] = 0.0, 3.5, -7.25
    rows[6, ::2], rows[7, 5] = 1e-30, 1e4
    rows[8] *= 1e-9
    rows[9] *= 1e30
    rows[10] = np.round(rows[10])
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_mlx(kind):
    rows, bits = special_rows(), kv_dtypes.QUANTIZED_BITS[kind]
    words, scales, biases = mx.quantize(mx.array(rows), group_size=64, bits=bits)
    expected = np.array(mx.dequantize(words, scales, biases, group_size=64, bits=bits))
    packed = kv_quantization_reference.quantize(rows, kind)
    groups = packed.view(np.uint8).reshape(len(rows), 2, -1)
    np.testing.assert_array_equal(groups[..., :4].copy().view(np.float32)[..., 0], scales)
    np.testing.assert_array_equal(groups[..., 4:8].copy().view(np.float32)[..., 0], biases)
    np.testing.assert_array_equal(kv_quantization_reference.dequantize(packed, kind), expected)
    assert packed.shape == (64, kv_dtypes.row_bytes(kind, 128))


@pytest.mark.parametrize("kind", KERNEL_KINDS)
def test_writes_quantise_and_nothing_else_changes(make_batch, kind):
    batch = make_batch([(1, 20), (33, 40)], poison=False)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((34, 2, 64)).astype(np.float32) for _ in range(2))
    k[3:14, 0], v[5] = special_rows()[:11, :64], 0.0
    pools, expected = batch.stored(kind), batch.stored(kind)
    backend = attention.create()
    plan = pools.plan(backend)
    for new, pool in ((k, expected.k_pool), (v, expected.v_pool)):
        flat = pool.reshape(-1, *pool.shape[2:])
        flat[plan.slot_mapping] = kv_quantization_reference.quantize(new, kind)
    out, _ = pools.forward(backend, plan, k, v)
    np.testing.assert_array_equal(pools.k_pool, expected.k_pool)
    np.testing.assert_array_equal(pools.v_pool, expected.v_pool)
    np.testing.assert_array_equal(out, expected.attend()[0])


@pytest.mark.parametrize("kind", KERNEL_KINDS)
@pytest.mark.parametrize(
    "lengths", [[(1, 70), (1, 9)], [(40, 70), (1, 9)]], ids=["decode", "tiled"]
)
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 128), (10, 2, 192)])
def test_bits_equal_those_of_float32_pools(make_batch, kind, lengths, heads):
    """The arithmetic is float32; only the storage differs."""
    q_heads, kv_heads, head_dim = heads
    batch = make_batch(lengths, heads=q_heads, kv_heads=kv_heads, head_dim=head_dim).stored(kind)
    for switches in ({}, {"split_kv": 3, "unit": "head"}):
        out, report = batch.attend(**switches)
        wide, wide_report = batch.widened().attend(**switches)
        np.testing.assert_array_equal(out, wide)
        ratio = kv_dtypes.row_bytes(kind, head_dim) / (4 * head_dim)
        queries = 2 * batch.q.nbytes
        assert report.bytes - queries == ratio * (wide_report.bytes - queries)


@pytest.mark.parametrize("kind", KERNEL_KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 33, "softcap": 5.0, "sinks": SINKS}], ids=["plain", "all"]
)
def test_kernels_equal_the_oracle_on_the_dequantised_pools(
    make_batch, lengths, kind, options, assert_close
):
    batch = make_batch(lengths).stored(kind)
    out, report = batch.attend(**options)
    assert_close(out, batch.widened().attend("reference", **options)[0])
    assert not report.stale
    assert report.counters()[f"kv_dtype.{kind}"] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_group_with_a_number_that_is_not_finite_is_not_a_number(kind, number):
    rows = special_rows()
    rows[0, 70] = number
    numbers = kv_quantization_reference.dequantize(
        kv_quantization_reference.quantize(rows, kind), kind
    )
    assert np.isnan(numbers[0, 64:]).all() and np.isfinite(numbers[0, :64]).all()
    backend = attention.create()
    backend.allocate([KVShape(1, 128, 128)], 2, 8, kind)
    backend.bind(0, scale=1.0, heads=1)
    one = np.array([1], np.int32)
    tables = {
        "block_tables": one[:, None],
        "seq_lens": one,
        "cu_seqlens_q": np.array([0, 1], np.int32),
    }
    k, v = rows[None, 1:2], rows[None, :1]
    out = backend.forward(0, rows[None, 1:2], k, v, backend.plan(**tables))
    np.testing.assert_array_equal(np.isnan(out[0, 0]), np.isnan(numbers[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_pools_are_allocated_in_whole_groups(kind):
    backend = attention.create()
    backend.allocate([KVShape(2, 128, 128)], 4, 16, kind)
    assert backend.values[0].shape == (4, 16, 2, kv_dtypes.row_bytes(kind, 128))
    assert kv_dtypes.head_dim_of(backend.keys[0]) == 128
    with pytest.raises(ValueError, match=r"set engine\.kv\.dtype=float32"):
        backend.allocate([KVShape(2, 80, 80)], 4, 16, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_at_load_compares_with_the_reference(kind, monkeypatch):
    verify_quantised(kind)
    groups = kv_dtypes.group_bytes(kind)
    quantize, dequantize = kv_quantization_reference.quantize, kv_quantization_reference.dequantize

    def other_scale(rows, name):
        packed = quantize(rows, name)
        parts = packed.view(np.uint8).reshape(*packed.shape[:-1], -1, groups)
        parts[..., 1:, :4] = parts[..., :1, :4]  # the scale of the group before
        return packed

    def other_sign(pool, name):
        return -dequantize(pool, name)

    for name, seeded, found in (
        ("quantize", other_scale, "the stored keys differ"),
        ("dequantize", other_sign, "the values that attention reads differ"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kv_quantization_reference, name, seeded)
            says = rf"{found} from their reference; set engine\.kv\.dtype"
            with pytest.raises(EngineError, match=says):
                verify_quantised.__wrapped__(kind)
