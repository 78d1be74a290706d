"""NumPy stand-ins for ``mlx.core`` and ``mlx.nn``.

A model module that imports these stand-ins computes on NumPy arrays. A function without a
counterpart raises ``NoCounterpart`` when it is called, and the model then runs on MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.layers import activations, norms
from labkit.engine.model.isolated_model_modules import PACKAGE, ModuleLoader

Array = NDArray[Any]


class NoCounterpart(TypeError):
    """A model uses a part of MLX that has no NumPy counterpart. The message names the part."""


class _Missing:
    """A name without a counterpart. It can be used in annotations, but a call raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise NoCounterpart(f"the model calls {self._name}, which has no NumPy counterpart")

    def __or__(self, _other: Any) -> _Missing:
        return self

    __ror__ = __or__


class Shim:
    """A stand-in for a module: the given members, and ``_Missing`` for any other name."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.__dict__.update(members)
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


def _attend(
    queries: Any,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: Any = None,
) -> Any:
    """Attend with the ``KVHandle`` that the cache returned as ``keys``."""
    if isinstance(keys, np.ndarray):
        raise NoCounterpart(
            "the model calls attention with other keys than those that its cache returned"
        )
    return keys.attend(queries, values, scale, mask, sinks)


def _compile(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return _compile if function is None else function


_BFLOAT16 = _Missing("mlx.core.bfloat16")


def _array(value: Any, dtype: Any = None) -> Array:
    """Return a NumPy array. The default dtypes are MLX's: float32 and int32."""
    array = np.array(value)
    if dtype is _BFLOAT16:
        # Round to nearest even at bit 16, keeping the value in float32.
        bits = array.astype(np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.asarray((rounded & np.uint32(0xFFFF0000)).view(np.float32))
    if dtype is None and array.dtype == np.float64:
        dtype = np.float32
    elif dtype is None and array.dtype == np.int64:
        dtype = np.int32
    return array if dtype is None else array.astype(dtype)


def _rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    scale = np.ones(x.shape[-1], np.float32) if weight is None else weight
    return norms.rms_norm(x, scale, eps)


def _layer_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> Array:
    one = np.ones(x.shape[-1], np.float32) if weight is None else weight
    zero = np.zeros(x.shape[-1], np.float32) if bias is None else bias
    return norms.layer_norm(x, one, zero, eps)


def _softmax(x: Array, axis: int | None = None, precise: bool = True) -> Array:
    del precise
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)  # type: ignore[no-any-return]


_SAME_IN_NUMPY = (
    *("abs", "add", "broadcast_to", "clip", "concatenate", "cos", "divide", "equal", "exp"),
    *("expand_dims", "expm1", "greater", "less", "log", "log1p", "logical_and", "logical_or"),
    *("matmul", "maximum", "mean", "minimum", "moveaxis", "multiply", "negative", "ones_like"),
    *("repeat", "reshape", "sin", "split", "sqrt", "square", "squeeze", "stack", "subtract"),
    *("sum", "swapaxes", "tanh", "tile", "transpose", "where", "zeros_like"),
    *("float16", "float32", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool_"),
)


def core() -> Shim:
    """Return the stand-in for ``mlx.core``, with functions over NumPy arrays."""
    members: dict[str, Any] = {name: getattr(np, name) for name in _SAME_IN_NUMPY}
    members |= {
        "array": _array,
        "bfloat16": _BFLOAT16,
        "compile": _compile,
        "inf": np.float32(np.inf),
        "pi": np.pi,
        "rsqrt": lambda x: np.float32(1.0) / np.sqrt(x),
        "sigmoid": activations.sigmoid,
        "softmax": _softmax,
        "stop_gradient": lambda x: x,
        "contiguous": np.ascontiguousarray,
        "finfo": np.finfo,
        "metal": Shim("mlx.core.metal", {"is_available": lambda: False}),
        "fast": Shim(
            "mlx.core.fast",
            {
                "rms_norm": _rms_norm,
                "layer_norm": _layer_norm,
                "scaled_dot_product_attention": _attend,
            },
        ),
    }
    return Shim("mlx.core", members)


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0.0))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": activations.silu,
    "gelu": activations.gelu,
    "gelu_approx": activations.gelu_approx,
    "relu": _relu,
    "relu2": lambda x: np.square(_relu(x)),
    "sigmoid": activations.sigmoid,
}


def nn() -> Shim:
    """Return the stand-in for ``mlx.nn``: MLX's layer classes, and activations over NumPy."""
    import mlx.nn

    layers = {
        name: value
        for name, value in vars(mlx.nn).items()
        if isinstance(value, type) and issubclass(value, mlx.nn.Module)
    }
    return Shim("mlx.nn", {**layers, **ACTIVATIONS})


def modules() -> ModuleLoader:
    """Return a loader of mlx_lm's model modules that compute on NumPy arrays."""
    shims = {"mlx.core": core(), "mlx.nn": nn()}
    package = Shim("mlx", {name.partition(".")[2]: shim for name, shim in shims.items()})
    return ModuleLoader(
        {"mlx": package, **shims},
        {
            f"{PACKAGE}.base": {"scaled_dot_product_attention": _attend},
            f"{PACKAGE}.activations": {"swiglu": activations.swiglu},
        },
    )
