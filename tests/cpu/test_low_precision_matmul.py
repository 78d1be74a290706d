"""Low-precision weights widen to MLX's values; products have the bits of float32 weights."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.cpu import gemm, low_precision_matmul
from labkit.cpu.low_precision_weights import (
    GROUP_SIZES,
    QUANTIZED_BITS,
    SPAN_COLUMNS,
    HalfMatrix,
    QuantizedMatrix,
)
from labkit.cpu.packed_linear import PackedLinear

DEPTH, WIDTH = 256, SPAN_COLUMNS + 11
# A format compiles in a second, so fast tests cover each bit count and type, but not each pair.
FAST = [(4, "float16"), (3, "bfloat16"), (8, "float32")]
FORMATS = [
    pytest.param(bits, kind, marks=() if (bits, kind) in FAST else pytest.mark.slow)
    for bits in QUANTIZED_BITS
    for kind in ("float32", "float16", "bfloat16")
]


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def words(array):
    """Return an MLX array as NumPy holds it: bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def quantised(bits, kind, group=32, seed=0, shape=(WIDTH, DEPTH)):
    """Return a quantised matrix, and what MLX dequantises it to in float32."""
    weight = mx.array(random(seed, *shape)).astype(getattr(mx, kind))
    parts = mx.quantize(weight, group_size=group, bits=bits)
    wide = (parts[0], *(part.astype(mx.float32) for part in parts[1:]))
    expected = mx.dequantize(*wide, group_size=group, bits=bits)
    return QuantizedMatrix(*map(words, parts), bits), np.array(expected)


def half_precision(kind, seed=0, shape=(WIDTH, DEPTH)):
    weight = mx.array(random(seed, *shape)).astype(getattr(mx, kind))
    return HalfMatrix(words(weight)), np.array(weight.astype(mx.float32))


def assert_product_of(matrix, expected):
    """The matrix widens to ``expected``, and its products have the bits of that matrix's."""
    bias = random(2, len(expected))
    packed, wide = (PackedLinear([weight], [bias]) for weight in (matrix, expected))
    np.testing.assert_array_equal(packed.take(np.arange(len(expected))), expected)
    x = random(1, low_precision_matmul.MAX_FUSED_ROWS + gemm.BLOCK_ROWS + 3, expected.shape[1])
    fused = low_precision_matmul.MAX_FUSED_ROWS
    for rows in (*range(1, 12), fused, fused + 1, len(x)):
        (product,), (same,) = packed.multiply(x[:rows]), wide.multiply(x[:rows])
        np.testing.assert_array_equal(product, same)
    exact = x.astype(np.float64) @ expected.T + bias
    scale = np.abs(x.astype(np.float64)) @ np.abs(expected.T) + np.abs(bias)
    assert (np.abs(product - exact) / scale).max() < 1e-6


@pytest.mark.parametrize(("bits", "kind"), FORMATS)
def test_quantised_weights_widen_as_in_mlx(bits, kind):
    for group in GROUP_SIZES:
        assert_product_of(*quantised(bits, kind, group))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", [3e-5, 2e-3, -1.4, 60000.0])
def test_mantissa_conversion_is_used_only_if_the_bias_stays_exact(kind, bias):
    matrix, _ = quantised(4, kind, shape=(SPAN_COLUMNS, 64))
    assert matrix.mantissa_exact
    matrix.biases[3, 1] = words(mx.array([bias]).astype(getattr(mx, kind)))[0]
    wide = [mx.array(part) for part in (matrix.scales, matrix.biases)]
    if kind == "bfloat16":
        wide = [part.view(mx.bfloat16) for part in wide]
    scale, exact = (float(part[3, 1].astype(mx.float32)) for part in wide)
    assert matrix.mantissa_exact == (float(np.float32(exact - 16 * scale)) == exact - 16 * scale)
    wide = [part.astype(mx.float32) for part in wide]
    expected = np.array(mx.dequantize(mx.array(matrix.words), *wide, group_size=32, bits=4))
    assert_product_of(matrix, expected)
    packed = PackedLinear([matrix], [None])  # products of one step along the depth are exact
    for step, x in enumerate(np.eye(64, dtype=np.float32)):
        np.testing.assert_array_equal(packed.multiply(x[None])[0][0], expected[:, step])


def test_mantissa_conversion_is_refused_on_overflow():
    matrix, _ = quantised(4, "bfloat16", shape=(SPAN_COLUMNS, 64))
    matrix.scales[0, 0] = 0x7F7F  # the largest bfloat16
    assert not matrix.mantissa_exact


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_is_widened_exactly(kind):
    assert_product_of(*half_precision(kind))
    assert_product_of(*half_precision(kind, shape=(5, 7)))


def test_a_row_has_the_same_bits_in_any_batch():
    matrix, _ = quantised(4, "float16", shape=(3 * SPAN_COLUMNS + 1, 64))
    packed = PackedLinear([matrix], [None])
    x = random(3, gemm.BLOCK_ROWS + 70, 64)
    (all_rows,) = packed.multiply(x)
    for rows in [*range(1, 71), gemm.BLOCK_ROWS + 1]:
        for offset in (0, 5):
            (few,) = packed.multiply(x[offset : offset + rows])
            np.testing.assert_array_equal(few, all_rows[offset : offset + rows])


def test_no_rows_write_nothing():
    """A step in which no request samples multiplies no rows with the output matrix."""
    matrix, _ = quantised(4, "float16", shape=(2 * SPAN_COLUMNS, 64))
    packed = PackedLinear([matrix], [None])
    guard = np.full(8 * SPAN_COLUMNS, 7.0, np.float32)
    x, out = random(3, 4, 64)[2:2], guard[4 * SPAN_COLUMNS : 4 * SPAN_COLUMNS]
    packed._panels.multiply(x, packed._bias, packed._columns, out)
    assert (guard == 7.0).all()


def test_matrices_share_a_product_only_in_one_format():
    pairs = [quantised(4, "float16", seed=i, shape=(n, 64)) for i, n in enumerate((96, 33, 5))]
    biases = [None, random(4, 33), None]
    together = PackedLinear([matrix for matrix, _ in pairs], biases)
    x = random(0, 9, 64)
    for part, (_, wide), bias in zip(together.multiply(x), pairs, biases, strict=True):
        assert part.flags.c_contiguous
        np.testing.assert_array_equal(part, PackedLinear([wide], [bias]).multiply(x)[0])
    assert together.weight_format == "quantised"
    other = quantised(4, "float16", group=64, shape=(8, 64))[0]
    for different in (other, half_precision("float16", shape=(8, 64))[0], random(0, 8, 64)):
        with pytest.raises(ValueError, match="the same depth and format"):
            PackedLinear([pairs[0][0], different], [None, None])


def test_packed_weights_take_the_bytes_of_the_model():
    matrix, _ = quantised(4, "float16", shape=(2 * SPAN_COLUMNS, 128))
    parts = (matrix.words, matrix.scales, matrix.biases)
    assert PackedLinear([matrix], [None]).bytes == sum(part.nbytes for part in parts)


def test_rows_are_selected_by_index():
    matrix, expected = quantised(8, "float32")
    packed = PackedLinear([matrix], [None])
    ids = np.array([[WIDTH - 1, 0], [7, 7]], np.int32)
    np.testing.assert_array_equal(packed.take(ids), expected[ids])
    with pytest.raises(IndexError, match=f"the matrix has {WIDTH}"):
        packed.take(np.array([WIDTH]))


def test_formats_that_mlx_lacks_are_refused():
    matrix, _ = quantised(4, "float16")
    with pytest.raises(ValueError, match="as in MLX"):
        QuantizedMatrix(matrix.words, matrix.scales, matrix.biases, 5)
    with pytest.raises(ValueError, match="the same dtype and shape"):
        QuantizedMatrix(matrix.words, matrix.scales, matrix.biases.astype(np.float32), 4)
    with pytest.raises(ValueError, match="float16"):
        HalfMatrix(np.zeros((4, 4), np.float64))
