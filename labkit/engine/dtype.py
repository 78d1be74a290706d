"""The type that an engine computes in: what is asked, and where the model runs.

On a CPU MLX multiplies half precision number by number (512 x 1024 x 1024: 200 ms, in
float32 10 with OpenBLAS), and labkit's own kernels compute in float32. So there ``model``
means float32 in every engine, and arms that leave the option alone compute in one type;
half precision that is asked for by name is what runs, fast or not. On Metal ``model``
keeps every weight as it is stored.
"""

from __future__ import annotations

from typing import Any

from labkit import config
from labkit.engine.attention.spec import ITEM_BYTES
from labkit.machine.macos import has_metal

# What MLX's attention is part of: the model runs on MLX's default device then.
MLX_BACKENDS = ("gather", "sdpa")


def asked(options: config.Engine) -> str | None:
    """Return the type that weights are cast to, in MLX's words; None: each keeps its own."""
    if options.dtype is not config.DType.model:
        return str(options.dtype.value)
    return None if _on_metal(options) else "float32"


def _on_metal(options: config.Engine) -> bool:
    attention = options.attention
    on_mlx = options.name == "mlx_lm" or attention.backend in MLX_BACKENDS
    return has_metal() and (on_mlx or attention.device is config.Device.metal)


def width(options: config.Engine, stored: int) -> int:
    """Return the bytes of a number that is computed with, where a model's take ``stored``."""
    kind = asked(options)
    return stored if kind is None else ITEM_BYTES[kind]


def cached(options: config.Engine, computed: str) -> str:
    """Return the type of the KV memory of a model that computes in ``computed``."""
    less = options.kv.dtype is not config.Precision.float32
    return str(options.kv.dtype.value) if less else computed


def cache_width(options: config.Engine, stored: int) -> int:
    """Return the bytes of a cached number, where a number of the model takes ``stored``."""
    less = options.kv.dtype is not config.Precision.float32
    return ITEM_BYTES[options.kv.dtype.value] if less else width(options, stored)


def cast(model: Any, kind: str | None) -> None:
    """Cast a loaded model's floating point parameters, and evaluate them all.

    What mlx_lm itself keeps in float32 when it converts a model (``cast_predicate``) is left
    as it is where ``kind`` is half precision. Quantised weights stay quantised; their scales
    are cast.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    if kind is not None:
        to = getattr(mx, kind)
        may = getattr(model, "cast_predicate", None) if to != mx.float32 else None

        def one(path: str, value: Any) -> Any:
            floating = mx.issubdtype(value.dtype, mx.floating)
            return value.astype(to) if floating and (may is None or may(path)) else value

        model.update(tree_map_with_path(one, model.parameters()))
    mx.eval(model.parameters())


def word(array_type: Any) -> str:
    """Return the name of an MLX type, as ``engine.dtype`` has it."""
    return str(array_type).rpartition(".")[2]
