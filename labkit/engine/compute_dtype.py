"""The types that an engine computes in and keeps weights in: what is asked, and where it runs.

On a CPU MLX multiplies half precision number by number (512 x 1024 x 1024: 200 ms, in
float32 10 with OpenBLAS), and labkit's own kernels compute in float32. So there ``model``
means float32 in every engine, and arms that leave the option alone compute in one type;
half precision that is asked for by name is what runs, fast or not. On Metal ``model``
keeps every weight as it is stored.

Matrices need not be float32 for that: labkit's kernels read them as they lie
(``engine.weights``), and so hold and read what the model has on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from labkit import config
from labkit.machine.macos import has_metal

# Not imported from ``labkit.cpu.kv_dtypes``: the process that plans must not import NumPy.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What MLX's attention is part of: the model runs on MLX's default device then.
MLX_BACKENDS = ("gather", "sdpa")
# What weights are held in, in less than float32, as counters have it.
NARROW_DTYPES = ("quantised", "float16", "bfloat16")


class MatrixStorage(Enum):
    """What loading does to the matrices of linear layers and embeddings.

    kept: nothing. cast: what is in floating point is cast like all else; quantised ones stay.
    widened: all become float32.
    """

    as_stored = "as_stored"
    cast = "cast"
    dequantized = "dequantized"


def cast_target(options: config.Engine) -> str | None:
    """Return the type that weights are cast to, in MLX's words; None: each keeps its own."""
    if options.weights is config.Weights.float32:
        return "float32"
    if options.dtype is not config.DType.model:
        return str(options.dtype.value)
    return None if _on_metal(options) else "float32"


def matrix_storage(options: config.Engine) -> MatrixStorage:
    """Return what becomes of the matrices: they are kept where labkit's own kernels multiply."""
    if options.weights is config.Weights.float32:
        return MatrixStorage.dequantized
    on_numpy = options.name != "mlx_lm" and options.attention.device is config.Device.cpu
    return (
        MatrixStorage.as_stored
        if on_numpy and cast_target(options) == "float32"
        else MatrixStorage.cast
    )


def _on_metal(options: config.Engine) -> bool:
    attention = options.attention
    on_mlx = options.name == "mlx_lm" or attention.backend in MLX_BACKENDS
    return has_metal() and (on_mlx or attention.device is config.Device.metal)


def compute_itemsize(options: config.Engine, stored: int) -> int:
    """Return the bytes of a number that is computed with, where a model's take ``stored``."""
    kind = cast_target(options)
    return stored if kind is None else ITEM_BYTES[kind]


def kv_dtype(options: config.Engine, computed: str) -> str:
    """Return the type of the KV memory of a model that computes in ``computed``."""
    less = options.kv.dtype is not config.Precision.float32
    return str(options.kv.dtype.value) if less else computed


def kv_itemsize(options: config.Engine, stored: int) -> int:
    """Return the bytes of a cached number, where a number of the model takes ``stored``."""
    less = options.kv.dtype is not config.Precision.float32
    return ITEM_BYTES[options.kv.dtype.value] if less else compute_itemsize(options, stored)


def cast_parameters(
    model: Any, kind: str | None, matrices: MatrixStorage = MatrixStorage.cast
) -> None:
    """Cast a loaded model's floating point parameters, and evaluate them all.

    What mlx_lm itself keeps in float32 when it converts a model (``cast_predicate``) is left
    as it is where ``kind`` is half precision. Quantised weights stay quantised, unless they are
    to be widened; their scales are cast.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    from labkit.engine import dequantized_layers

    if matrices is MatrixStorage.dequantized:
        dequantized_layers.dequantize_matrices(model)
    kept = (
        dequantized_layers.matrix_parameter_names(model)
        if matrices is MatrixStorage.as_stored
        else frozenset()
    )
    if kind is not None:
        to = getattr(mx, kind)
        may = getattr(model, "cast_predicate", None) if to != mx.float32 else None

        def one(path: str, value: Any) -> Any:
            floating = mx.issubdtype(value.dtype, mx.floating) and path not in kept
            return value.astype(to) if floating and (may is None or may(path)) else value

        model.update(tree_map_with_path(one, model.parameters()))
    mx.eval(model.parameters())


def weight_bytes_by_dtype(model: Any) -> dict[str, int]:
    """Return the bytes of an MLX model's weights by what they are held in."""
    from mlx.utils import tree_flatten

    total: dict[str, int] = {}
    for _, value in tree_flatten(model.parameters()):
        kind = dtype_name(value.dtype)
        name = "quantised" if kind == "uint32" else kind
        total[name] = total.get(name, 0) + value.nbytes
    return total


def weight_counters(held: Mapping[str, int]) -> dict[str, float]:
    """Return the counters of weights, from their bytes by what they are held in."""
    narrow = sum(held.get(form, 0) for form in NARROW_DTYPES)
    return {**{f"weights.{form}": size for form, size in held.items()}, "weights.narrow": narrow}


def dtype_name(array_type: Any) -> str:
    """Return the name of an MLX type, as ``engine.dtype`` has it."""
    return str(array_type).rpartition(".")[2]
