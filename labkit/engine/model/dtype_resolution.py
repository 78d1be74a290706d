"""The dtypes of computation, weights and KV memory that the options of the engine resolve to.

On a CPU, MLX has no fast product of half-precision matrices (512 x 1024 x 1024: 200 ms; in float32
with OpenBLAS: 10 ms), and labkit's own kernels compute in float32. So ``engine.dtype=model`` means
float32 on a CPU in every engine, and half precision is used only if ``engine.dtype`` names it. On
a GPU ``engine.dtype=model`` keeps the stored dtype of every weight.

Computing in float32 does not need float32 matrices: labkit's kernels read quantised and
half-precision weights in their stored dtype (``engine.weights``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from labkit import config
from labkit.config.engine.attention import MLX_BACKENDS
from labkit.machine.facts.mlx_default_device import mlx_gpu

# Not imported from ``labkit.cpu.precision.kv_dtypes``: the process that plans must not import
# NumPy.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits per element of quantised keys and values: those of the integer, plus one, because the scale
# and the bias of each group of 64 elements have 64 bits.
QUANTIZED_KV_BITS = {"int8": 9, "int4": 5}
INTEGER_DTYPES = ("uint32", "uint8", "int8")  # codes and scales of quantised matrices
# Storage narrower than float32, as counters name it.
NARROW_DTYPES = ("quantised", "float16", "bfloat16")


class MatrixStorage(Enum):
    """How loading stores the matrices of linear layers and embeddings.

    ``as_stored``: unchanged. ``cast``: floating-point matrices are cast like all other weights,
    quantised matrices stay quantised. ``dequantized``: all matrices become float32.
    """

    as_stored = "as_stored"
    cast = "cast"
    dequantized = "dequantized"


@dataclass(frozen=True, slots=True)
class WeightLoading:
    """What loading does to a model's weights.

    ``dtype``: the MLX dtype that floating-point weights are cast to (None: each keeps its own).
    ``layers``: only so many first layers are loaded, the last norm and the output layer (None: all
    layers).
    """

    dtype: str | None = "float32"
    matrix_storage: MatrixStorage = MatrixStorage.cast
    layers: int | None = None

    @classmethod
    def of(cls, options: config.Engine, layers: int | None = None) -> WeightLoading:
        """Return the loading that an engine's options ask for."""
        return cls(cast_target(options), matrix_storage(options), layers)


FLOAT32 = WeightLoading()


def cast_target(options: config.Engine) -> str | None:
    """Return the MLX dtype that weights are cast to, or None if each weight keeps its dtype."""
    if options.weights is config.Weights.float32:
        return "float32"
    if options.dtype is not config.DType.model:
        return str(options.dtype.value)
    return None if _on_gpu(options) else "float32"


def matrix_storage(options: config.Engine) -> MatrixStorage:
    """Return how loading stores matrices: unchanged only if labkit's kernels multiply them."""
    if options.weights is config.Weights.float32:
        return MatrixStorage.dequantized
    on_numpy = options.name != "mlx_lm" and options.attention.device is config.Device.cpu
    as_stored = on_numpy and cast_target(options) == "float32"
    return MatrixStorage.as_stored if as_stored else MatrixStorage.cast


def _on_gpu(options: config.Engine) -> bool:
    attention = options.attention
    on_mlx = options.name == "mlx_lm" or attention.backend in MLX_BACKENDS
    gpu = mlx_gpu()
    return gpu is not None and (on_mlx or attention.device.value == gpu)


def kv_dtype(options: config.Engine, computed: str) -> str:
    """Return the KV memory's dtype: ``engine.kv.dtype`` or, if that is float32, ``computed``."""
    narrow = options.kv.dtype is not config.KVDType.float32
    return str(options.kv.dtype.value) if narrow else computed


def kv_bits(options: config.Engine, stored: int) -> int:
    """Return the bits of a KV element, with scales. ``stored``: bytes of a stored weight."""
    dtype = options.kv.dtype
    if dtype.quantised:
        return QUANTIZED_KV_BITS[dtype.value]
    computed = cast_target(options) if dtype is config.KVDType.float32 else dtype.value
    return 8 * (stored if computed is None else ITEM_BYTES[computed])


def cast_parameters(model: Any, loading: WeightLoading = FLOAT32) -> None:
    """Cast a loaded model's floating-point parameters to ``loading.dtype``, and evaluate them all.

    If it is half precision, parameters that mlx_lm keeps in float32 when it converts a model
    (``cast_predicate``) stay as they are. With ``as_stored``, so do matrices and their scales; with
    ``cast``, the scales of quantised matrices are cast; with ``dequantized``, these matrices become
    float32 before the cast.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    from labkit.engine.model import dequantized_layers

    unchanged: frozenset[str] = frozenset()
    if loading.matrix_storage is MatrixStorage.as_stored:
        unchanged = dequantized_layers.matrix_parameter_names(model)
    elif loading.matrix_storage is MatrixStorage.dequantized:
        dequantized_layers.dequantize_matrices(model)
    else:
        dequantized_layers.replace_block_layers(model)
    if loading.dtype is not None:
        target = getattr(mx, loading.dtype)
        may_cast = getattr(model, "cast_predicate", None) if target != mx.float32 else None

        def cast(path: str, value: Any) -> Any:
            floating = mx.issubdtype(value.dtype, mx.floating) and path not in unchanged
            casts = floating and (may_cast is None or may_cast(path))
            return value.astype(target) if casts else value

        model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())


def weight_bytes_by_dtype(model: Any) -> dict[str, int]:
    """Return the bytes of an MLX model's weights by dtype, all integers under ``quantised``."""
    from mlx.utils import tree_flatten

    total: dict[str, int] = {}
    for _, value in tree_flatten(model.parameters()):
        dtype = dtype_name(value.dtype)
        name = "quantised" if dtype in INTEGER_DTYPES else dtype
        total[name] = total.get(name, 0) + value.nbytes
    return total


def weight_counters(weight_bytes: Mapping[str, int]) -> dict[str, float]:
    """Return counters of bytes: ``weights.<dtype>``, ``weights.narrow`` (quantised and half)."""
    narrow = sum(weight_bytes.get(dtype, 0) for dtype in NARROW_DTYPES)
    return {
        **{f"weights.{dtype}": nbytes for dtype, nbytes in weight_bytes.items()},
        "weights.narrow": narrow,
    }


def dtype_name(dtype: Any) -> str:
    """Return the name of an MLX dtype, as in ``engine.dtype``."""
    return str(dtype).rpartition(".")[2]
