"""Norms, activations and rotary embedding, compared with float64 NumPy and with MLX."""

import math

import mlx.core as mx
import numpy as np
import pytest

from labkit.cpu.layers import activations, norms
from labkit.cpu.layers.rope import RotaryTable


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Few rows run serially, many in parallel.
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("width", [1, 17, 64, 256])
def test_rms_norm_matches_float64(rows, width):
    x, weight = random(0, rows, 1, width), random(1, width)
    exact = x.astype(float)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(norms.rms_norm(x, weight, 1e-5), exact, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 300])
def test_layer_norm_matches_float64(rows):
    x, weight, bias = random(0, rows, 1, 80) + 3, random(1, 80), random(2, 80)
    exact = x.astype(float)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(
        exact.var(-1, keepdims=True) + 1e-5
    ) * weight + bias
    np.testing.assert_allclose(norms.layer_norm(x, weight, bias, 1e-5), exact, atol=5e-6)


def test_a_norm_has_the_same_bits_in_any_batch():
    x, weight, bias = random(0, 400, 96), random(1, 96), random(2, 96)
    rms, layer = norms.rms_norm(x, weight, 1e-6), norms.layer_norm(x, weight, bias, 1e-6)
    for rows in (1, 2, 3, 70, 171):
        np.testing.assert_array_equal(norms.rms_norm(x[:rows], weight, 1e-6), rms[:rows])
        np.testing.assert_array_equal(norms.layer_norm(x[:rows], weight, bias, 1e-6), layer[:rows])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


EXACT = {
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_approx": lambda x: (
        0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [1, 37, 20_011])
def test_activation_matches_float64(name, size):
    x = np.linspace(-30, 30, size, dtype=np.float32).reshape(size, 1)
    actual = getattr(activations, name)(x)
    assert actual.shape == x.shape
    exact = EXACT[name](x.astype(float))
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=3e-7)


def test_activation_of_extreme_inputs():
    x = np.array([-1e30, -200, -88, 88, 200, 1e30, -np.inf, np.inf, np.nan, 0], np.float32)
    actual = activations.sigmoid(x)
    np.testing.assert_allclose(actual[:6], [0, 0, 0, 1, 1, 1], atol=1e-30)
    np.testing.assert_allclose(actual[6:8], [0, 1], atol=1e-30)
    assert np.isnan(actual[8])
    assert actual[9] == 0.5
    assert np.isnan(activations.silu(x)[8])


def test_swiglu_matches_float64_serially_and_in_chunks():
    gate, x = random(0, 130, 1, 96), random(1, 130, 1, 96)
    exact = EXACT["silu"](gate.astype(float)) * x
    np.testing.assert_allclose(activations.swiglu(gate, x), exact, rtol=1e-5, atol=1e-6)
    # 12,480 numbers run in parallel chunks, one row serially: the same bits.
    np.testing.assert_array_equal(
        activations.swiglu(gate[77], x[77]), activations.swiglu(gate, x)[77]
    )
    with pytest.raises(ValueError, match="must be equal"):
        activations.swiglu(gate, x[:-1])


def inverse_frequencies(dims, base=10_000.0):
    return (base ** (-np.arange(0, dims, 2) / dims)).astype(np.float32)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("dims", [16, 32])
def test_rope_matches_mlx(traditional, tokens, dims):
    x = random(0, tokens, 4, 1, 32)
    positions = np.random.default_rng(1).integers(0, 3000, tokens).astype(np.int32)
    table = RotaryTable(inverse_frequencies(dims), 1.0)
    actual = table.rotate(x, positions, traditional=traditional)
    expected = mx.fast.rope(
        mx.array(x),
        dims,
        traditional=traditional,
        base=10_000.0,
        scale=1.0,
        offset=mx.array(positions),
    )
    # At position 3000 one unit in the last place of an angle is 2.4e-4 radians.
    np.testing.assert_allclose(actual, np.asarray(expected), atol=2e-3)
    near = positions < 30
    np.testing.assert_allclose(actual[near], np.asarray(expected)[near], atol=2e-5)


@pytest.mark.parametrize("traditional", [False, True])
def test_rope_multiplies_pairs_by_a_complex_rotation(traditional):
    dims, scale = 8, 0.25
    x = random(0, 5, 2, 3, 10)
    offsets = np.array([0, 4, 9, 300, 2], np.int32)
    frequencies = inverse_frequencies(dims)
    actual = RotaryTable(frequencies, scale).rotate(
        x, offsets, traditional=traditional, input_scale=1.5
    )
    for b, start in enumerate(offsets):
        for t in range(3):
            angle = (start + t) * scale * frequencies.astype(float)
            pairs = x[b, :, t, :dims].astype(float) * 1.5
            if traditional:
                z = pairs[:, 0::2] + 1j * pairs[:, 1::2]
            else:
                z = pairs[:, : dims // 2] + 1j * pairs[:, dims // 2 :]
            z = z * np.exp(1j * angle)
            real, imaginary = (
                (actual[b, :, t, 0:dims:2], actual[b, :, t, 1:dims:2])
                if traditional
                else (actual[b, :, t, : dims // 2], actual[b, :, t, dims // 2 : dims])
            )
            np.testing.assert_allclose(real, z.real, atol=2e-5)
            np.testing.assert_allclose(imaginary, z.imag, atol=2e-5)
            np.testing.assert_array_equal(actual[b, :, t, dims:], x[b, :, t, dims:])


@pytest.mark.parametrize("last", [255, 256, 257, 511, 512, 1000])
def test_rope_beyond_its_table_grows_the_table(last):
    x = random(0, 2, 1, 1, 8)
    frequencies = inverse_frequencies(8)
    actual = RotaryTable(frequencies, 1.0).rotate(
        x, np.array([0, last], np.int32), traditional=False
    )
    angle = np.float32(last) * frequencies
    z = (x[1, 0, 0, :4] + 1j * x[1, 0, 0, 4:]) * np.exp(1j * angle.astype(float))
    np.testing.assert_allclose(actual[1, 0, 0], [*z.real, *z.imag], atol=1e-6)


def test_rope_accepts_a_scalar_offset_and_refuses_wrong_offsets():
    table = RotaryTable(inverse_frequencies(8), 1.0)
    x = random(0, 3, 2, 1, 8)
    np.testing.assert_array_equal(
        table.rotate(x, 7, traditional=False),
        table.rotate(x, np.full(3, 7, np.int32), traditional=False),
    )
    with pytest.raises(ValueError, match=r"must be \(3,\)"):
        table.rotate(x, np.zeros(2, np.int32), traditional=False)
    with pytest.raises(ValueError, match="negative position"):
        table.rotate(x, np.array([0, -1, 2], np.int32), traditional=False)
