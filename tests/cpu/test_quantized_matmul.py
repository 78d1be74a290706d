"""Low-precision weights widen to MLX's values; products have the bits of float32 weights."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.cpu.matmul import gemm, quantized_matmul
from labkit.cpu.matmul.packed_linear import PackedLinear
from labkit.cpu.matmul.quantized_weights import (
    GROUP_SIZES,
    QUANTIZED_BITS,
    SPAN_COLUMNS,
    BlockMatrix,
    HalfMatrix,
    QuantizedMatrix,
)
from labkit.cpu.precision.gguf_block_arrays import BlockArrays
from labkit.cpu.precision.gguf_block_formats import BLOCK_FORMATS

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
    x = random(1, quantized_matmul.MAX_FUSED_ROWS + gemm.BLOCK_ROWS + 3, expected.shape[1])
    fused = quantized_matmul.MAX_FUSED_ROWS
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


def in_blocks(name, shape=(WIDTH, 512)):
    """Return a random matrix in a block format and its weights, computed in float64 from codes."""
    rng, layout = np.random.default_rng(0), BLOCK_FORMATS[name]
    codes = rng.integers(0, 1 << layout.bits, shape)
    stream = codes[..., None] >> np.arange(layout.bits) & 1
    words = np.packbits(stream.reshape(shape[0], -1), axis=1, bitorder="little").view(np.uint32)
    groups, blocks = ((shape[0], shape[1] // n) for n in (layout.group_size, layout.block_steps))
    drawn = {
        "int8": lambda: rng.integers(-128, 128, groups, np.int8),
        "uint8": lambda: rng.integers(0, 64, groups, np.uint8),
        "pairs": lambda: rng.integers(0, 256, groups, np.uint8),
        "powers": lambda: rng.choice(np.array([0, 1, 2, 126, 127, 128], np.uint8), groups),
        "float16": lambda: rng.standard_normal(groups).astype(np.float16),
    }[layout.scales]
    scales = {part: drawn() for part in layout.group_arrays}
    scales |= {part: rng.standard_normal(blocks).astype(np.float16) for part in layout.super_arrays}

    def final(part, factors):
        wide = part.astype(np.float64)
        if factors in scales:
            wide *= np.repeat(scales[factors].astype(np.float64), layout.super_groups, axis=1)
        return np.repeat(wide, layout.group_size, axis=1)

    scale, minimum = scales["scales"], scales.get("mins")
    if layout.scales == "pairs":
        scale, minimum = scale & 15, scale >> 4
    elif layout.scales == "powers":
        scale = 2.0 ** (scale.astype(int) - 128)
    values = np.array(layout.table)[codes] if layout.table else codes - layout.offset
    expected = final(scale, "super_scales") * values
    if minimum is not None:
        expected = expected - final(minimum, "super_mins")
    return BlockMatrix(BlockArrays(name, words, scales)), expected.astype(np.float32)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("q4_k", "iq4_xs") else pytest.param(name, marks=pytest.mark.slow)
        for name in BLOCK_FORMATS
    ],
)
def test_block_formats_widen_as_in_ggml(name):
    """The float64 weight is exact, so its float32 is the weight rounded once."""
    matrix, expected = in_blocks(name)
    assert_product_of(matrix, expected)
    # A whole span has no padding: the packed bytes are the matrix's.
    whole, _ = in_blocks(name, (SPAN_COLUMNS, 512))
    parts = whole.arrays.words.nbytes + sum(part.nbytes for part in whole.arrays.scales.values())
    assert PackedLinear([whole], [None]).bytes == parts


def test_block_arrays_of_another_shape_are_refused():
    matrix, _ = in_blocks("q6_k", (3, 512))
    arrays = matrix.arrays
    with pytest.raises(ValueError, match=r"a q6_k matrix \(3, 512\) must have"):
        BlockArrays("q6_k", arrays.words, {"scales": arrays.scales["scales"]})
    with pytest.raises(ValueError, match=r"a q6_k matrix \(3, 384\) must have"):
        BlockArrays("q6_k", arrays.words[:, :72], dict(arrays.scales))
    unsigned = {**arrays.scales, "scales": arrays.scales["scales"].view(np.uint8)}
    with pytest.raises(ValueError, match="must have"):
        BlockArrays("q6_k", arrays.words, unsigned)


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
    packed._multiply(x, out)
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
        QuantizedMatrix(matrix.words, matrix.scales, matrix.biases, 7)
    with pytest.raises(ValueError, match="the same dtype and shape"):
        QuantizedMatrix(matrix.words, matrix.scales, matrix.biases.astype(np.float32), 4)
    with pytest.raises(ValueError, match="float16"):
        HalfMatrix(np.zeros((4, 4), np.float64))
