"""The float32 matrix product: close to float64, and the same bits for a row in any batch."""

import numpy as np
import pytest

from labkit.cpu.matmul import gemm
from labkit.cpu.matmul.packed_linear import PackedLinear


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(product, x, weight, bias=0.0):
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    # The size of the terms that were rounded and summed.
    scale = np.abs(x.astype(np.float64)) @ np.abs(weight.T.astype(np.float64))
    return float((np.abs(product - exact) / scale).max())


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 33])
@pytest.mark.parametrize(
    ("depth", "width"), [(64, 128), (256, 33), (7, 5), (1, 1), (96, 4 * gemm.PANEL_COLUMNS + 1)]
)
def test_product_matches_float64(rows, depth, width):
    x, weight, bias = random(0, rows, depth), random(1, width, depth), random(2, width)
    (product,) = PackedLinear([weight], [bias]).multiply(x)
    assert product.shape == (rows, width)
    assert product.dtype == np.float32
    assert relative_error(product, x, weight, bias) < 1e-6


def test_many_rows_span_row_blocks():
    rows = 2 * gemm.BLOCK_ROWS + 5
    x, weight = random(0, rows, 40), random(1, 70, 40)
    (product,) = PackedLinear([weight], [None]).multiply(x)
    assert relative_error(product, x, weight) < 1e-6


def test_several_matrices_in_one_call_equal_separate_calls():
    x = random(0, 9, 48)
    weights = [random(1, 96, 48), random(2, 33, 48), random(3, 8, 48)]
    biases = [None, random(4, 33), None]
    together = PackedLinear(weights, biases).multiply(x)
    for part, weight, bias in zip(together, weights, biases, strict=True):
        (alone,) = PackedLinear([weight], [bias]).multiply(x)
        assert part.flags.c_contiguous
        np.testing.assert_array_equal(part, alone)


@pytest.mark.parametrize(("depth", "width"), [(256, 5 * gemm.PANEL_COLUMNS), (33, 45)])
def test_a_row_has_the_same_bits_in_any_batch(depth, width):
    # Wide enough for the tile that serves a single row; the bias is part of the order.
    weights = [random(0, width, depth), random(1, 40, depth)]
    packed = PackedLinear(weights, [random(4, width), random(2, 40)])
    x = random(3, 2 * gemm.BLOCK_ROWS + 3, depth)
    all_rows = packed.multiply(x)
    for rows in [*range(1, 71), gemm.BLOCK_ROWS, gemm.BLOCK_ROWS + 1]:
        for offset in (0, 5):
            few = packed.multiply(x[offset : offset + rows])
            for part, whole in zip(few, all_rows, strict=True):
                np.testing.assert_array_equal(part, whole[offset : offset + rows])


@pytest.mark.parametrize("width", [300, 1100])
def test_a_row_has_the_same_bits_for_any_number_of_threads(width):
    import numba

    packed = PackedLinear([random(0, width, 256)], [random(2, width)])
    x = random(1, 19, 256)
    (many,), (alone,) = packed.multiply(x), packed.multiply(x[:1])
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        (one,) = packed.multiply(x)
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(one, many)
    np.testing.assert_array_equal(one[:1], alone)


def test_nan_and_inf_stay_in_their_row_and_column():
    x, weight = random(0, 11, 32), random(1, 50, 32)
    x[4, 3] = np.nan
    weight[41, 7] = np.inf
    (product,) = PackedLinear([weight], [None]).multiply(x)
    assert np.isnan(product[4]).all()
    others = np.delete(np.delete(product, 4, axis=0), 41, axis=1)
    assert np.isfinite(others).all()
    assert not np.isfinite(product[:, 41]).any()


def test_nothing_is_written_outside_the_result():
    # A tile that overran its matrix would overwrite the next one in the same buffer.
    depth, width = 16, gemm.PANEL_COLUMNS + 3
    x = random(0, gemm.GEMM_ROWS + 1, depth)
    first, second = PackedLinear(
        [np.ones((width, depth), np.float32), np.zeros((width, depth), np.float32)], [None, None]
    ).multiply(x)
    np.testing.assert_allclose(first, np.repeat(x.sum(1, keepdims=True), width, 1), rtol=1e-4)
    assert not second.any()


def test_a_wrong_input_is_refused():
    packed = PackedLinear([random(0, 8, 16)], [None])
    with pytest.raises(ValueError, match=r"must be \[\.\.\., 16\]"):
        packed.multiply(random(1, 3, 15))
    with pytest.raises(TypeError):
        packed.multiply(np.ones((3, 16)))
    with pytest.raises(ValueError, match="the same depth and format"):
        PackedLinear([random(0, 8, 16), random(0, 8, 17)], [None, None])


def test_leading_axes_and_strides():
    packed = PackedLinear([random(0, 8, 16), random(1, 5, 16)], [None, None])
    x = random(1, 3, 4, 2, 16)
    flat = packed.multiply(x.reshape(24, 16))
    for part, rows in zip(packed.multiply(x), flat, strict=True):
        np.testing.assert_array_equal(part, rows.reshape(3, 4, 2, -1))
    for part, rows in zip(packed.multiply(x.swapaxes(0, 1)), packed.multiply(x), strict=True):
        np.testing.assert_array_equal(part, rows.swapaxes(0, 1))


def test_no_rows_give_an_empty_product():
    (product,) = PackedLinear([random(0, 8, 16)], [None]).multiply(np.empty((0, 16), np.float32))
    assert product.shape == (0, 8)
