"""The stand-ins for MLX's functions have the values that MLX has."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.engine.numpy_port import mlx_shim

CORE = mlx_shim.core()


def bits(array):
    return np.asarray(mx.array(array).view(mx.uint32))


def test_rounding_to_bfloat16_is_mlx_s():
    """Ties go to the even number, up and down, in both signs."""
    edges = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32)
    draw = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values = np.concatenate([edges.view(np.float32), draw, draw * 1e30, draw * 1e-30])
    rounded = CORE.array(values, CORE.bfloat16)
    assert rounded.dtype == np.float32
    expected = mx.array(values).astype(mx.bfloat16).astype(mx.float32)
    np.testing.assert_array_equal(bits(rounded), bits(expected))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.5, np.float32), (2, np.int32), (True, np.bool_), (np.float16(1), np.float16),
     (np.uint8(1), np.uint8)],
)  # fmt: skip
def test_an_array_has_mlx_s_default_type(value, dtype):
    assert CORE.array(value).dtype == dtype
    assert CORE.array(value, np.float16).dtype == np.float16


def test_functions_have_mlx_s_values():
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    weight, bias = x[1] + 2, x[2]
    for name, arguments in (
        ("softmax", (x,)), ("rsqrt", (np.abs(x),)), ("sigmoid", (x,)), ("stop_gradient", (x,)),
    ):  # fmt: skip
        ours, theirs = getattr(CORE, name), getattr(mx, name)
        expected = np.array(theirs(*map(mx.array, arguments)))
        np.testing.assert_allclose(ours(*arguments), expected, rtol=1e-5, atol=1e-6)
    first = np.array(mx.softmax(mx.array(x), axis=0))
    np.testing.assert_allclose(CORE.softmax(x, axis=0), first, rtol=1e-5)
    for name, arguments in (
        ("rms_norm", (x, weight, 1e-5)), ("rms_norm", (x, None, 1e-5)),
        ("layer_norm", (x, weight, bias, 1e-5)), ("layer_norm", (x, None, None, 1e-5)),
    ):  # fmt: skip
        arrays = [mx.array(a) if isinstance(a, np.ndarray) else a for a in arguments]
        expected = np.array(getattr(mx.fast, name)(*arrays))
        actual = getattr(CORE.fast, name)(*arguments)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert (CORE.inf, CORE.pi) == (np.inf, np.pi) and CORE.metal.is_available() is False


def test_a_compiled_function_is_the_function():
    def double(x):
        return 2 * x

    assert CORE.compile(double) is double
    assert CORE.compile(shapeless=True)(double) is double


def test_what_numpy_lacks_is_named():
    with pytest.raises(mlx_shim.NoCounterpart, match="other keys than those"):
        CORE.fast.scaled_dot_product_attention(*[np.zeros(1)] * 3, scale=1.0)
    with pytest.raises(mlx_shim.NoCounterpart):
        CORE.no_such_function(1)
