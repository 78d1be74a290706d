"""KV pools of half precision on the CPU: stored numbers are rounded, arithmetic is float32."""

import mlx.core as mx
import numba
import numpy as np
import pytest
from numba import njit, types
from numba.core.itanium_mangler import mangle

from labkit.cpu.attention.attention_intrinsics import (
    copy_widened,
    round_to_bfloat16,
    round_to_float16,
)
from labkit.cpu.attention.attention_params import PARAMS_DTYPES, params_type
from labkit.cpu.precision import half_precision, kv_dtypes
from labkit.cpu.runtime.jit import intrinsic
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import VECTOR_BYTES, Emitter
from labkit.engine import attention
from labkit.engine.attention.kv_and_state_shapes import KVShape

HALF_DTYPES = ("float16", "bfloat16")
ROUND = {"float16": round_to_float16, "bfloat16": round_to_bfloat16}
ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
SINKS = np.linspace(-3, 6, 8).astype(np.float32)


def assert_same_numbers(actual, expected):
    """Assert equal bits, except among NaNs."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(actual), nan)
    kind = f"u{expected.itemsize}"
    assert np.array_equal(actual.view(kind)[~nan], expected.view(kind)[~nan])


def as_float(words, kind):
    """Return 16-bit patterns as MLX reads them."""
    typed = mx.array(words).view(getattr(mx, kind))
    return np.array(typed.astype(mx.float32))


@pytest.mark.parametrize("kind", HALF_DTYPES)
def test_every_16_bit_number_widens_exactly(kind):
    stored, out = (
        ALL_PATTERNS.view(kv_dtypes.NUMPY_DTYPES[kind]),
        np.empty(len(ALL_PATTERNS), np.float32),
    )
    layer = np.zeros(1, PARAMS_DTYPES[stored.dtype])

    @njit
    def widen(layers, target, source, vectors):
        copy_widened(layers[0], target, source, vectors)

    widen(layer, out.ctypes.data, stored.ctypes.data, len(out) // LANES)
    assert_same_numbers(out, as_float(ALL_PATTERNS, kind))
    assert_same_numbers(kv_dtypes.to_float32(stored), as_float(ALL_PATTERNS, kind))


def test_float16_widens_exactly_without_the_instruction():
    @intrinsic
    def widen_vector(typing_context, target, source):
        def emit(context, builder, signature, arguments):
            code = Emitter(builder)
            words = code.load(arguments[1], kind=half_precision.I16_VECTOR)
            code.store(half_precision.widen_by_arithmetic(code, words), arguments[0])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    @njit
    def widen(target, source, vectors):
        for i in range(vectors):
            widen_vector(target + i * VECTOR_BYTES, source + i * VECTOR_BYTES // 2)

    out = np.empty(len(ALL_PATTERNS), np.float32)
    widen(out.ctypes.data, ALL_PATTERNS.ctypes.data, len(out) // LANES)
    assert_same_numbers(out, as_float(ALL_PATTERNS, "float16"))


@pytest.mark.parametrize("kind", HALF_DTYPES)
def test_float32_is_rounded_to_the_nearest_and_ties_to_even(kind):
    """Every 16-bit number, the midpoints between neighbours, and one bit to each side of both."""
    near = as_float(ALL_PATTERNS, kind)
    near = np.sort(near[np.isfinite(near)]).astype(np.float64)
    between = (near[:-1] + near[1:]) / 2
    exact = np.concatenate([near, between]).astype(np.float32)
    bits = exact.view(np.uint32).astype(np.int64)
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 65519.99, 65520, 3.4028235e38])
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    beside = [(bits + step).astype(np.uint32) for step in (-1, 0, 1)]
    numbers = np.concatenate([*beside, special.astype(np.float32).view(np.uint32), random])
    numbers = numbers.view(np.float32)
    numbers = np.resize(numbers, -(-len(numbers) // LANES) * LANES)
    row, out = ROUND[kind], np.empty(len(numbers), np.uint16)

    @njit
    def write(target, source, vectors):
        row(target, source, vectors)

    write(out.ctypes.data, numbers.ctypes.data, len(numbers) // LANES)
    expected = np.array(mx.array(numbers).astype(getattr(mx, kind)).view(mx.uint16))
    nan = np.isnan(numbers)
    assert np.array_equal(out[~nan], expected[~nan])
    assert np.isnan(as_float(out[nan], kind)).all()
    with np.errstate(over="ignore"):
        twin = kv_dtypes.from_float32(numbers, kind).view(np.uint16)
    assert np.array_equal(twin[~nan], expected[~nan])


@pytest.mark.parametrize("kind", HALF_DTYPES)
def test_writes_round(make_batch, kind):
    batch = make_batch([(1, 20), (33, 40)], poison=False)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((34, 2, 64)).astype(np.float32) for _ in range(2))
    pools, expected = batch.stored(kind), batch.stored(kind)
    backend = attention.create()
    plan = pools.plan(backend)
    for new, pool in ((k, expected.k_pool), (v, expected.v_pool)):
        pool.reshape(-1, 2, 64)[plan.slot_mapping] = kv_dtypes.from_float32(new, kind)
    out, _ = pools.forward(backend, plan, k, v)
    assert np.array_equal(pools.k_pool, expected.k_pool)
    assert np.array_equal(pools.v_pool, expected.v_pool)
    assert np.array_equal(out, expected.attend()[0])


@pytest.mark.parametrize("kind", kv_dtypes.NUMPY_DTYPES)
def test_a_slot_of_minus_one_is_skipped(make_batch, kind):
    batch = make_batch([(3, 20)], poison=False).stored(kind)
    guarded = np.concatenate([batch.k_pool[:1], batch.k_pool])
    batch.k_pool = guarded[1:]  # slot -1 would be in the block before it
    before, backend = guarded.copy(), attention.create()
    plan = batch.plan(backend)
    plan.slot_mapping[:] = -1
    new = np.ones((3, 2, 64), np.float32)
    batch.forward(backend, plan, new, new)
    assert np.array_equal(guarded, before)


def test_mangled_names_differ_between_pool_dtypes():
    """Else functions that were compiled in different processes could be confused."""
    kinds = {name: params_type(layer) for name, layer in PARAMS_DTYPES.items()}
    names = [mangle("f", [types.CPointer(kind), kind]) for kind in kinds.values()]
    assert len(set(names)) == len(kv_dtypes.POOL_DTYPES)
    for kind in kinds.values():  # numba's own name of a record differs between processes
        assert kind.mangling_args == (f"AttentionParams_{kind.typeof('kv_dtype_marker')}", ())


@pytest.mark.parametrize("kind", HALF_DTYPES)
def test_pools_are_allocated_in_half_precision(kind):
    backend = attention.create()
    backend.allocate([KVShape(2, 64, 64)], 4, 16, kind)
    assert backend.keys[0].dtype == kv_dtypes.NUMPY_DTYPES[kind]
    assert backend.values[0].shape == (4, 16, 2, 64)


@pytest.mark.parametrize("kind", HALF_DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 33, "softcap": 5.0, "sinks": SINKS}], ids=["plain", "all"]
)
def test_kernels_equal_the_oracle_on_the_rounded_pools(
    make_batch, lengths, kind, options, assert_close
):
    batch = make_batch(lengths).stored(kind)
    out, report = batch.attend(**options)
    assert_close(out, batch.widened().attend("reference", **options)[0])
    assert not report.stale
    assert report.counters()[f"kv_dtype.{kind}"] == 1


@pytest.mark.parametrize("kind", HALF_DTYPES)
@pytest.mark.parametrize(
    "lengths", [[(1, 70), (1, 9)], [(40, 70), (1, 9)]], ids=["decode", "tiled"]
)
@pytest.mark.parametrize("switches", [{}, {"split_kv": 3, "unit": "head"}])
def test_bits_equal_those_of_float32_pools(make_batch, kind, lengths, switches):
    """The arithmetic is float32; only the storage differs."""
    for head_dim, heads in ((16, (4, 4)), (80, (8, 2)), (128, (6, 1)), (256, (5, 1))):
        batch = make_batch(lengths, heads=heads[0], kv_heads=heads[1], head_dim=head_dim).stored(
            kind
        )
        out, report = batch.attend(**switches)
        wide, wide_report = batch.widened().attend(**switches)
        assert np.array_equal(out, wide)
        queries = 2 * batch.q.nbytes
        assert 2 * (report.bytes - queries) == wide_report.bytes - queries


@pytest.mark.parametrize("kind", HALF_DTYPES)
def test_resolvers_threads_and_switches_do_not_change_a_bit(make_batch, lengths, kind):
    batch = make_batch(lengths).stored(kind)
    out, _ = batch.attend(window=40)
    for switches in (
        {"resolver": "seq_map"},
        {"resolver": "work_plan"},
        {"window_skip": False},
        {"tile_threshold": 1 << 20},
    ):
        assert np.array_equal(batch.attend(window=40, **switches)[0], out)
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert np.array_equal(batch.attend(window=40)[0], out)
    finally:
        numba.set_num_threads(threads)


def test_the_oracle_refuses_pools_of_another_type(make_batch):
    with pytest.raises(ValueError, match="but the layer needs"):
        make_batch([(1, 9)]).stored("float16").attend("reference")


@pytest.mark.parametrize("device", ["gather", "emulated"])
def test_mlx_converts_queries_to_the_dtype_of_its_pools(make_batch, device, request):
    options = {"backend": device} if device != "emulated" else {"device": device}
    if device == "emulated":
        request.getfixturevalue("compiler")
    batch = make_batch([(1, 9), (3, 20)]).stored("float16")
    out, _ = batch.attend(**options)
    expected, _ = batch.widened().attend("reference")
    assert out.dtype == np.float32
    assert np.abs(out - expected).max() < 2e-3


def test_a_pool_of_another_type_is_refused():
    with pytest.raises(ValueError, match="must be float32, float16, bfloat16, not float64"):
        kv_dtypes.dtype_name(np.zeros(1))
