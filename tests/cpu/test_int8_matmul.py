"""Products of int8 activations have the bits of their NumPy reference, in every form and batch."""

import dataclasses
from fractions import Fraction

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types

from labkit.cpu.matmul import int8_dot, int8_matmul, int8_microkernels
from labkit.cpu.matmul import int8_matmul_self_test as self_test
from labkit.cpu.matmul.packed_linear import PackedLinear
from labkit.cpu.matmul.quantized_matmul import MAX_FUSED_ROWS
from labkit.cpu.matmul.quantized_weights import GROUP_SIZES, SPAN_COLUMNS, QuantizedMatrix

# A format compiles in seconds, so fast tests cover each bit count and type, but not each triple.
FAST = [("float16", 4, 32), ("bfloat16", 8, 32)]
FORMATS = [
    pytest.param(*key, marks=() if key in FAST else pytest.mark.slow)
    for key in ((spec.element, spec.bits, spec.group_size) for spec in int8_microkernels.FORMATS)
]
MORE_FORMATS = []  # of ``use_functions_of``


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dequantized(matrix):
    integers = self_test.unpack(matrix).reshape(*matrix.scales.shape, -1)
    scales, biases = (
        self_test.to_float32(part).astype(np.float64) for part in (matrix.scales, matrix.biases)
    )
    return (integers * scales[..., None] + biases[..., None]).reshape(matrix.shape)


def test_a_product_and_sum_are_rounded_once():
    """The sums of these products need more bits than a float64 has, so two roundings may differ."""
    rng, count, differ = np.random.default_rng(0), 2000, 0
    a, b = (rng.integers(1 << 23, 1 << 24, count).astype(np.float32) for _ in range(2))
    # Sums halfway between two float32, apart from an addend too small for the float64 sum.
    middle = (a.astype(np.float64) * b).astype(np.float32) * np.float32(1.5)
    c = np.where(
        np.arange(count) % 2, np.ldexp(np.float32(1), rng.integers(-40, 30, count)), middle
    )
    c = c.astype(np.float32)
    fused = self_test.fma(a, b, c)
    for i in range(count):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        near = [np.nextafter(fused[i], np.float32(way)) for way in (-np.inf, np.inf)]
        errors = [abs(Fraction(float(value)) - exact) for value in (fused[i], *near)]
        assert errors[0] <= min(errors[1:])
        differ += np.float32(np.float64(a[i]) * np.float64(b[i]) + np.float64(c[i])) != fused[i]
    half = np.float32(2**24 + 2), np.float32(1 + 2**-23), np.float32(2.0**-60)
    exact = Fraction(float(half[0])) * Fraction(float(half[1])) + Fraction(float(half[2]))
    (one,) = self_test.fma(*(np.array([value]) for value in half))
    assert abs(Fraction(float(one)) - exact) <= Fraction(float(np.spacing(one))) / 2


def test_activations_are_the_nearest_multiples_of_the_scale():
    x = random(0, 5, 96) * np.float32([[1e-3], [1], [1e3], [1e30], [0]])
    rows = self_test.quantize(x, 32)
    groups = x.reshape(5, 3, 32).astype(np.float64)
    np.testing.assert_array_equal(rows.scales, np.abs(x).reshape(5, 3, 32).max(2) / np.float32(127))
    scales = rows.scales[..., None].astype(np.float64)
    assert np.abs(rows.integers[:4]).max(axis=2).min() == 127
    assert (np.abs(rows.integers * scales - groups) <= scales * 0.500001).all()
    np.testing.assert_allclose(rows.sums, scales[..., 0] * rows.integers.sum(axis=2), rtol=1e-6)
    assert not rows.integers[4].any() and not rows.sums[4].any()


@pytest.mark.parametrize(("element", "bits", "group"), FORMATS)
def test_products_have_the_bits_of_the_reference(element, bits, group):
    matrix = self_test.random_matrix(element, bits, group)
    assert self_test.find_mismatch(matrix) is None
    self_test.verify(element, bits, group)


@pytest.mark.parametrize(("element", "bits", "group"), FAST)
def test_products_are_as_precise_as_the_activations(element, bits, group):
    matrix = self_test.random_matrix(element, bits, group)
    x, weights = random(1, 9, matrix.shape[1]), dequantized(matrix)
    out = PackedLinear([matrix], [None], activations="int8").multiply(x)[0]
    scales = self_test.quantize(x, group).scales.astype(np.float64)
    limit = 0.5001 * np.repeat(scales, group, axis=1) @ np.abs(weights).T
    error = np.abs(out - x.astype(np.float64) @ weights.T)
    assert (error <= limit).all() and error.max() > 1e-3 * limit.max()


def test_a_row_has_the_same_bits_in_any_batch():
    matrix = self_test.random_matrix("float16", 4, 32)
    packed = PackedLinear([matrix], [random(2, matrix.shape[0])], activations="int8")
    x = random(3, 2 * MAX_FUSED_ROWS + 3, matrix.shape[1])
    (all_rows,) = packed.multiply(x)
    for rows in (
        *range(1, 2 * int8_microkernels.TILE_ROWS + 2),
        MAX_FUSED_ROWS,
        MAX_FUSED_ROWS + 1,
    ):
        for first in (0, 5):
            (few,) = packed.multiply(x[first : first + rows])
            np.testing.assert_array_equal(few, all_rows[first : first + rows])


def test_numbers_that_are_not_finite_are_not_lost():
    matrix = self_test.random_matrix("float16", 4, 32)
    packed = PackedLinear([matrix], [None], activations="int8")
    x = random(4, 6, matrix.shape[1])
    expected = packed.multiply(x)[0]
    for number in (np.nan, np.inf, -np.inf):
        x[3, 40] = number
        out = packed.multiply(x)[0]
        assert not np.isfinite(out[3]).any()
        np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(expected, 3, 0))


def test_weights_of_other_formats_are_multiplied_in_float32():
    words = np.zeros((SPAN_COLUMNS, 96 * 6 // 32), np.uint32)
    scales = np.ones((SPAN_COLUMNS, 3), np.float16)
    for weight in (QuantizedMatrix(words, scales, scales, 6), random(0, SPAN_COLUMNS, 96)):
        assert PackedLinear([weight], [None], activations="int8").activations == "float32"
    matrix = self_test.random_matrix("float16", 4, 32)
    assert PackedLinear([matrix], [None]).activations == "float32"
    packed = PackedLinear([matrix], [None], activations="int8")
    assert packed.activations == "int8"
    ids = np.array([3, SPAN_COLUMNS + 4])
    np.testing.assert_allclose(packed.take(ids), dequantized(matrix)[ids], rtol=1e-6)


def use_functions_of(monkeypatch, spec, *, tag):
    """Compile the functions of a format, without numba's cache, and let products use them.

    Every format has an index of its own, because numba compiles an intrinsic once per index.
    """

    def compile_function(function, *constants):
        function.__qualname__ = "_".join([function.__name__, tag, *map(str, constants)])
        arguments = [types.int64] * function.__code__.co_argcount
        return numba.cfunc(types.void(*arguments))(function)

    MORE_FORMATS.append(spec)
    monkeypatch.setattr(int8_microkernels, "FORMATS", [*int8_microkernels.FORMATS, *MORE_FORMATS])
    monkeypatch.setattr(int8_matmul, "FORMATS", int8_microkernels.FORMATS)
    monkeypatch.setattr(int8_matmul, "compile_function", compile_function)
    functions = int8_matmul.compile_functions(len(int8_microkernels.FORMATS) - 1)
    monkeypatch.setattr(int8_matmul, "int8_functions", lambda *_: functions)


def spec_with(form, group=32):
    return int8_microkernels.Int8Format("float16", form.bits, group, form)


@pytest.mark.parametrize("offset", [0, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_other_cpus_forms_have_the_same_bits(monkeypatch, bits, offset):
    """The generic form, and the one of NEON, whose products of 8-bit weights are signed."""

    def add_signed(code, sums, weights, activations):
        build = code.builder
        for place in (0, 8, 16, 24):
            wide = [
                build.ashr(
                    build.shl(part, code.integer_constant(24 - place)), code.integer_constant(24)
                )
                for part in (weights, activations)
            ]
            product = build.mul(*wide)
            sums = product if sums is None else build.add(sums, product)
        return sums

    form = int8_dot.generic(bits)
    if offset:
        form = dataclasses.replace(form, add=add_signed, weight_offset=offset if bits == 8 else 0)
    use_functions_of(monkeypatch, spec_with(form), tag=f"offset{offset}")
    matrix = self_test.random_matrix("float16", bits, 32)
    assert self_test.find_mismatch(matrix) is None


def saturating(form):
    """Return a form that adds up bytes of any size in int16, as ``vpmaddubsw`` invites to do."""

    def add(code, sums, weights, activations):
        kind = ir.VectorType(ir.IntType(16), 16)
        name = ir.FunctionType(kind, [kind, kind])
        total = form.add(code, None, weights, activations)
        if sums is None:
            return total
        function = code.declared("llvm.sadd.sat.v16i16", name)
        halves = [code.split(vector, 8) for vector in (sums, total)]
        parts = [code.builder.call(function, pair) for pair in zip(*halves, strict=True)]
        return code.join(parts)

    return dataclasses.replace(form, add=add, max_terms=1 << 30)


def test_a_lost_sign_is_caught(monkeypatch):
    store = int8_microkernels._emit_store

    def store_unsigned(code, form, integers, *place):
        store(code, form, code.builder.and_(integers, code.integer_constant(0x7F)), *place)

    monkeypatch.setattr(int8_microkernels, "_emit_store", store_unsigned)
    use_functions_of(monkeypatch, spec_with(int8_dot.host_form(4)), tag="unsigned")
    matrix = self_test.random_matrix("float16", 4, 32)
    assert "not" in self_test.find_mismatch(matrix)


@pytest.mark.skipif(int8_dot.host_form(4).name != "pairs256", reason="needs AVX2 without VNNI")
def test_a_saturating_sum_is_caught(monkeypatch):
    """Groups of 128 exceed an int16 only if activations and weights are the largest."""
    form = saturating(int8_dot.host_form(4))
    use_functions_of(monkeypatch, spec_with(form, 128), tag="saturating")
    matrix = self_test.random_matrix("float16", 4, 128)
    assert "not" in self_test.find_mismatch(matrix)


def test_another_groups_scale_is_caught(monkeypatch):
    parts = int8_microkernels._row_parts

    def first_header(code, spec, x, groups, index):
        return parts(code, spec, x, groups, index)[0], parts(
            code, spec, x, groups, ir.Constant(index.type, 0)
        )[1]

    monkeypatch.setattr(int8_microkernels, "_row_parts", first_header)
    use_functions_of(monkeypatch, spec_with(int8_dot.host_form(4)), tag="first_scale")
    matrix = self_test.random_matrix("float16", 4, 32)
    assert "not" in self_test.find_mismatch(matrix)


def test_a_mismatch_at_load_says_what_to_set(monkeypatch):
    monkeypatch.setattr(self_test, "find_mismatch", lambda *_: "element [0, 1] is wrong")
    with pytest.raises(self_test.Int8MismatchError, match=r"set engine\.activations=float32"):
        self_test.verify.__wrapped__("float16", 4, 32)


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "name"),
    [
        ("x86_64-unknown-linux-gnu", "znver5", "+avx2,+avx512bw,+avx512vnni,+avxvnni", "vnni512"),
        ("x86_64-unknown-linux-gnu", "alderlake", "+avx2,+avxvnni,-avx512vnni", "vnni256"),
        ("x86_64-unknown-linux-gnu", "skylake-avx512", "+avx2,+avx512bw,-avx512vnni", "pairs512"),
        ("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma", "pairs256"),
        ("x86_64-unknown-linux-gnu", "nehalem", "+sse4.2,-avx2", "generic"),
        ("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+dotprod", "sdot"),
        ("aarch64-unknown-linux-gnu", "cortex-a53", "+neon", "generic"),
        ("arm64-apple-darwin24", "apple-m1", "", "sdot"),
    ],
)
def test_the_form_of_a_target(triple, cpu, features, name):
    for bits in int8_dot.BITS:
        assert int8_dot.form_of(bits, triple, cpu, features).name == name


@pytest.mark.parametrize("group", GROUP_SIZES)
def test_no_sum_overflows(group):
    """The largest sums of a group fit an int32 and are exact in float32."""
    assert group * 255 * 128 < 1 << 24
    assert int8_dot.PAIRS_TERMS * 2 * 15 * 128 < 1 << 15
