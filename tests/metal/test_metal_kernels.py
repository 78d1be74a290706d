"""The emulated kernels equal the float64 oracle, under three schedules each."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metal_batches import RESOLVERS, attend, batch, check, prover

from labkit.metal.emulator import KernelFault

pytestmark = pytest.mark.usefixtures("compiler")

SHAPES = {
    "decode": ([1, 1, 1], [37, 1, 300]),
    "mixed": ([1, 1, 40], [37, 1, 77]),
    "ragged tail": ([33, 31, 5], [33, 64, 18]),
    "spec verify": ([4, 4, 3], [50, 17, 3]),
    "empty segments": ([0, 1, 0, 2, 0], [9, 20, 1, 2, 40]),
}


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_match_the_oracle_and_resolvers_are_bit_equal(shape, kernel):
    heads = (4, 2) if shape in ("decode", "spec verify") else (1, 1)
    b = batch(*SHAPES[shape], heads=heads[0], kv_heads=heads[1])
    expected, evidence, _ = attend(b, kernel=kernel)
    check(b, expected)
    assert evidence.stamp == evidence.expected_stamp
    for resolver in RESOLVERS[1:]:
        if resolver == "identity" and shape != "decode":
            continue
        out, evidence, _ = attend(b, kernel=kernel, resolver=resolver)
        assert out.tobytes() == expected.tobytes(), resolver
        assert evidence.stamp == evidence.expected_stamp
        assert evidence.search_iterations == 0


POOL_FORMATS = [
    (mx.float16, 64, 16),
    (mx.bfloat16, 128, 32),
    (mx.float32, 80, 8),
    (mx.bfloat16, 96, 16),
    (mx.float16, 112, 8),
    (mx.float32, 256, 32),
    (mx.float16, 192, 16),
]


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), POOL_FORMATS)
def test_dtypes_head_sizes_and_block_sizes(dtype, head_dim, block_size):
    pool_format = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size, "heads": 2}
    for shape in ("decode", "ragged tail"):
        query_lens, contexts = SHAPES[shape]
        b = batch(query_lens, contexts, **pool_format)
        out, evidence, dispatch = attend(b)
        check(b, out)
        assert evidence.stamp == evidence.expected_stamp
        fits = dtype != mx.float32 or head_dim <= 128
        assert dispatch.kernel == ("tiled" if shape != "decode" and fits else "decode")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_every_dtype_head_size_and_block_size(dtype, head_dim, block_size):
    pool_format = {"dtype": dtype, "head_dim": head_dim, "block_size": block_size, "heads": 2}
    b = batch([1, 35, 6], [45, 40, 90], **pool_format)
    options = {"window": 37, "softcap": 20.0, "sinks": np.array([0.5, -1.0], np.float32)}
    for kernel in ("decode", "tiled"):
        if kernel == "tiled" and dtype == mx.float32 and head_dim > 128:
            continue
        for given_options in ({}, options):
            out, _, _ = attend(b, kernel=kernel, **given_options)
            check(b, out, **given_options)


OPTIONS = {
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.array([2.0, -5.0], np.float32)},
    "all": {"window": 33, "softcap": 3.0, "sinks": np.array([30, 0], np.float32)},
}


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, kernel):
    b = batch([1, 36, 5], [100, 60, 40], heads=2, kv_heads=1)
    out, _, _ = attend(b, kernel=kernel, **OPTIONS[name])
    check(b, out, **OPTIONS[name])


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
def test_window_skip_changes_the_visited_blocks_and_no_bit(kernel):
    b = batch([1, 36, 5], [100, 60, 40], heads=2, kv_heads=1)
    skipping, with_skip, _ = attend(b, kernel=kernel, window=20)
    masking, without_skip, _ = attend(b, kernel=kernel, window=20, window_skip=False)
    assert masking.tobytes() == skipping.tobytes()
    assert with_skip.kv_blocks_visited < without_skip.kv_blocks_visited


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
def test_without_window_skip_masked_values_are_read(kernel):
    """The pool of values ends before the block of the first keys: reading these is a fault."""
    b = batch([2], [96], heads=2, kv_heads=1)
    tables, last = b.block_tables.copy(), len(b.v_pool) - 1
    tables[tables == last], tables[0, 0] = tables[0, 0], last
    b = replace(b, block_tables=tables)

    def shortened(call):
        inputs = ((k, v[:-1] if k == "v_pool" else v) for k, v in call.inputs)
        return prover()(call.with_inputs(tuple(inputs)))

    attend(b, kernel=kernel, executor=shortened, window=20)
    with pytest.raises(KernelFault, match="outside v_pool"):
        attend(b, kernel=kernel, executor=shortened, window=20, window_skip=False)


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize("window_skip", [True, False])
def test_very_negative_logits_under_a_window(kernel, window_skip):
    # Every logit is near -2,000: if a masked block raised the running maximum to 0, all
    # weights would be 0.
    b = batch([1, 36], [200, 90], heads=2, kv_heads=1)
    k_pool = b.k_pool - 100.0
    b = type(b)(np.abs(b.q) + 1, k_pool, *list(vars(b).values())[2:])
    options = {"window": 20, "window_skip": window_skip}
    out, _, _ = attend(b, kernel=kernel, **options)
    check(b, out, window=20)


@pytest.mark.parametrize(
    ("kernel", "window_skip", "bad"),
    [
        ("decode", True, np.nan),
        ("decode", False, np.inf),
        ("tiled", True, np.inf),
        ("tiled", False, np.nan),
    ],
)
def test_masked_nan_and_infinity_do_not_leak(kernel, window_skip, bad):
    # Token 30 is bad; only queries whose window includes it may be NaN or infinite.
    b = batch([40], [70], heads=2)
    v_pool = b.v_pool.copy()
    v_pool[b.block_tables[0, 1], 14] = bad
    b = type(b)(b.q, b.k_pool, v_pool, *list(vars(b).values())[3:])
    out, _, _ = attend(b, kernel=kernel, window=5, window_skip=window_skip)
    sees_bad = [30 + t - 4 <= 30 <= 30 + t for t in range(40)]
    not_finite = ~np.isfinite(out).all(axis=(1, 2))
    assert not_finite.tolist() == sees_bad


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_lengths_around_every_block_boundary(kernel, block_size):
    contexts = [n for base in (1, 2, 4) for n in (base * block_size + d for d in (-1, 0, 1))]
    b = batch([1] * 9 if kernel == "decode" else [3] * 9, contexts, block_size=block_size)
    out, _, _ = attend(b, kernel=kernel)
    check(b, out)


@pytest.mark.parametrize(("split_kv", "resolvers"), [(2, []), (3, RESOLVERS[1:]), (7, [])])
def test_split_kv_with_sinks(split_kv, resolvers):
    sinks = np.array([1.0, -2.0, 3.0, 0.0], np.float32)
    b = batch([1, 1], [200, 3])  # the short one leaves partitions empty
    out, evidence, dispatch = attend(b, split_kv=split_kv, sinks=sinks)
    check(b, out, sinks=sinks)
    assert dispatch.partitions == split_kv
    assert evidence.stamp == evidence.expected_stamp
    for resolver in resolvers:
        other, _, _ = attend(b, split_kv=split_kv, sinks=sinks, resolver=resolver)
        assert other.tobytes() == out.tobytes(), resolver


@pytest.mark.parametrize("kernel", ["decode", "tiled"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "shared"), [(4, 2, 2), (4, 1, 4), (5, 1, 5), (16, 1, 8)]
)
def test_a_larger_unit_searches_less_and_changes_no_bit(heads, kv_heads, shared, kernel):
    b = batch([1, 2], [90, 17], heads=heads, kv_heads=kv_heads)
    plain, alone, _ = attend(b, kernel=kernel)
    check(b, plain)
    assert alone.grid[0] == heads
    shared = shared if kernel == "decode" else 1
    for unit, columns in (("kv_head", kv_heads), ("token", 1)):
        out, report, dispatch = attend(b, kernel=kernel, unit=unit)
        assert out.tobytes() == plain.tobytes()
        assert (report.grid[0], dispatch.sharing_heads) == (columns, shared)
        assert alone.search_iterations * columns == report.search_iterations * heads
        assert alone.kv_blocks_visited == shared * report.kv_blocks_visited


def test_spec_verify_as_unit_segments_equals_one_window():
    b = batch([4], [50])
    whole, _, _ = attend(b, kernel="decode")
    stairs = type(b)(
        b.q,
        b.k_pool,
        b.v_pool,
        np.repeat(b.block_tables, 4, axis=0),
        np.array([47, 48, 49, 50], np.int32),
        np.arange(5, dtype=np.int32),
        b.dtype,
    )
    out, _, dispatch = attend(stairs)
    assert dispatch.kernel == "decode"
    assert out.tobytes() == whole.tobytes()


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_ragged_batches(data):
    query_lens = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    if sum(query_lens) == 0:
        query_lens[0] = 1
    contexts = [max(n, 1) + data.draw(st.integers(0, 40)) for n in query_lens]
    b = batch(query_lens, contexts, heads=1, kv_heads=1, seed=data.draw(st.integers(0, 99)))
    kernel = data.draw(st.sampled_from(["decode", "tiled"]))
    out, evidence, _ = attend(b, kernel=kernel)
    check(b, out)
    other, _, _ = attend(b, kernel=kernel, resolver="seq_map")
    assert other.tobytes() == out.tobytes()
    assert evidence.stamp == evidence.expected_stamp


def test_wrong_maps_change_the_output_and_read_within_bounds():
    b = batch([1, 3, 1], [40, 7, 20])
    expected, _, _ = attend(b, kernel="decode", resolver="seq_map")
    maps = np.array([0, 1, 1, 1, 1], np.int32), np.zeros(3, np.int32)
    out, _, _ = attend(
        b, kernel="decode", resolver="seq_map", maps=maps, executor=single_run_emulator()
    )
    assert out.tobytes() != expected.tobytes()


def single_run_emulator():
    from labkit.metal.emulator.kernel_emulator import Emulator

    return Emulator()
