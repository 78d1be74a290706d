"""Convert a loaded mlx_lm model to NumPy arrays (described in the package's docstring)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.layers import norms
from labkit.cpu.layers.rope import RotaryTable
from labkit.cpu.matmul import int8_dot, int8_matmul_self_test
from labkit.cpu.matmul.packed_linear import WeightMatrix, share_format
from labkit.cpu.matmul.quantized_weights import (
    BlockMatrix,
    HalfMatrix,
    QuantizedMatrix,
    is_affine_format,
)
from labkit.cpu.precision.gguf_block_arrays import BlockArrays
from labkit.cpu.runtime.aligned_memory import SlabAllocator
from labkit.engine.model.isolated_model_modules import PACKAGE, import_plain
from labkit.engine.model.layer_cache import KVHandle, ValueHandle
from labkit.engine.numpy_port import numpy_layers
from labkit.engine.numpy_port.mlx_shim import ACTIVATIONS, NoCounterpart, modules
from labkit.engine.parallel import mlx_ring

Array = NDArray[np.float32]

# Projections of the same input, which are computed by one product.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Layers of mlx.nn without arithmetic, which are not replaced.
PLAIN_LAYERS = ("Dropout", "Identity", "Sequential")


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of ``convert``: the converted layers, or the reason that there are none.

    ``reason``: why the model runs on MLX arrays (None: it was converted to NumPy's). ``layers`` has
    the number of converted layers by class. ``weights`` has the bytes of the weights by format, as
    in the counters ``weights.<format>``; of a converted model, those of its matrices.
    ``activations`` has the bytes of the matrices that a converted model multiplies, by the type of
    the activations.
    """

    reason: str | None
    layers: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.reason is None


def convert(model: Any, *, low_precision: bool = False, activations: str = "float32") -> Conversion:
    """Convert an mlx_lm model in place, so that its forward runs on NumPy arrays without MLX.

    The converted model takes int32 ids [T, 1] and one cache per layer, and returns float32 logits
    [T, 1, vocabulary]. A cache's ``offset`` is int32 [T], and its ``update_and_fetch`` returns a
    ``layer_cache.KVHandle`` and its ``ValueHandle``.

    Weights must be float32. With ``low_precision``, matrices may also be quantised or in half
    precision, and are read in that format. ``activations`` is the format of the activations in
    products with these matrices, ``float32`` or ``int8``. With ``int8``, the kernels are checked
    against their reference first.

    The model is converted only if a trial forward of two tokens succeeds. Otherwise the model is
    left unchanged, so that MLX can run it, and the result has the reason. Raises
    ``Int8MismatchError`` if the kernels for int8 activations fail their check.
    """
    converter = _Converter(low_precision, activations)
    try:
        converted = converter.module(model, "model")
        _try_forward(converted, len(import_plain("cache").make_prompt_cache(model)))
    except NoCounterpart as error:
        return Conversion(str(error))
    except Exception as error:
        # A forward of foreign code on foreign arrays may fail in any way.
        line = (str(error).splitlines() or [""])[0]
        return Conversion(
            f"the model's forward fails on NumPy arrays: {type(error).__name__}: {line}"
        )
    for weight_format in sorted(converter.int8_formats):
        int8_matmul_self_test.verify(*weight_format)
    # In place, so that every existing reference to the model refers to the converted model.
    model.clear()
    dict.update(model, converted)
    model.__dict__.clear()
    model.__dict__.update(converted.__dict__)
    model.__class__ = type(converted)
    layers = dict(sorted(converter.converted.items()))
    return Conversion(None, layers, converter.weights(), converter.activations())


class _Converter:
    """Copies a tree of modules. A layer that is used twice is copied once."""

    def __init__(self, low_precision: bool, activations: str) -> None:
        import mlx.core
        import mlx.nn

        from labkit.engine.model.gguf_block_layers import BlockEmbedding, BlockLayer, BlockLinear

        self.mx, self.nn = mlx.core, mlx.nn
        self._block_layer = BlockLayer
        self.converted: Counter[str] = Counter()
        self.int8_formats: set[tuple[str, int, int]] = set()
        self._low_precision = low_precision
        self._activations = activations
        self._slabs = SlabAllocator()
        # Layers sharded over their outputs need no sum, because each rank has the whole input.
        self._linear = (
            *(mlx.nn.Linear, mlx.nn.QuantizedLinear, BlockLinear),
            *(mlx.nn.AllToShardedLinear, mlx.nn.QuantizedAllToShardedLinear),
        )
        self._summed = (mlx.nn.ShardedToAllLinear, mlx.nn.QuantizedShardedToAllLinear)
        self._embedding = (mlx.nn.Embedding, mlx.nn.QuantizedEmbedding, BlockEmbedding)
        self._weight_layers: list[Any] = []
        self._modules = modules()
        self._copies: dict[int, Any] = {}
        self._tables: dict[tuple[bytes, float], RotaryTable] = {}
        self._functions = {
            id(getattr(mlx.nn, name)): function for name, function in ACTIVATIONS.items()
        }

    def weights(self) -> dict[str, int]:
        """Return the bytes of all matrices by format."""
        total: Counter[str] = Counter()
        for layer in self._weight_layers:
            total[layer.weights.format] += layer.weights.bytes
        return dict(total)

    def activations(self) -> dict[str, int]:
        """Return the bytes of the matrices that a forward multiplies, by type of activations."""
        total: Counter[str] = Counter()
        for layer in self._weight_layers:
            if layer.weights.activations is not None:
                total[layer.weights.activations] += layer.weights.bytes
        return dict(total)

    def module(self, module: Any, path: str) -> Any:
        """Return the converted copy of a module at ``path`` in the model."""
        if id(module) not in self._copies:
            layer = self._layer(module, path)
            self._copies[id(module)] = self._container(module, path) if layer is None else layer
        return self._copies[id(module)]

    def _container(self, module: Any, path: str) -> Any:
        original: Any = type(module)
        kind: Any
        if original.__module__.startswith(f"{PACKAGE}."):
            kind = getattr(self._modules.load(original.__module__), original.__qualname__, None)
            if not isinstance(kind, type):
                raise NoCounterpart(
                    f"the model's class {original.__qualname__} is defined inside a function"
                )
        elif original.__module__.startswith("mlx.nn.") and original.__name__ in PLAIN_LAYERS:
            kind = original
        else:
            raise NoCounterpart(
                f"{path} is a {original.__module__}.{original.__name__}, "
                "which has no NumPy counterpart"
            )
        copy = kind.__new__(kind)
        copy.__dict__.update({name: self._value(v, path) for name, v in vars(module).items()})
        groups = self._groups(module, path)
        for name, value in module.items():
            setattr(copy, name, groups.get(name) or self._value(value, f"{path}.{name}"))
        return copy

    def _groups(self, module: Any, path: str) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for names in GROUPS:
            siblings = [module.get(name) for name in names]
            if any(type(layer) not in self._linear for layer in siblings):
                continue
            weights = [self._matrix(layer, path) for layer in siblings]
            if not share_format(weights):
                continue
            biases = [self._array(layer.get("bias"), path) for layer in siblings]
            group = numpy_layers.ProjectionGroup(weights, biases, self._slabs, self._activations)
            self._weight_layers.append(group)
            members |= {name: numpy_layers.GroupedLinear(group, i) for i, name in enumerate(names)}
            self.converted.update(type(layer).__name__ for layer in siblings)
        return members

    def _value(self, value: Any, path: str) -> Any:
        if isinstance(value, self.nn.Module):
            return self.module(value, path)
        if isinstance(value, self.mx.array):
            return self._array(value, path)
        if isinstance(value, dict):
            return {key: self._value(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._value(item, f"{path}.{i}") for i, item in enumerate(value))
        return self._functions.get(id(value), value)

    def _array(self, array: Any, path: str) -> Any:
        """Return a view of an MLX array, or a copy if it is not contiguous."""
        if array is None:
            return None
        if self.mx.issubdtype(array.dtype, self.mx.floating) and array.dtype != self.mx.float32:
            kind = str(array.dtype).rpartition(".")[2]
            raise NoCounterpart(f"{path} is {kind}, but the NumPy path computes in float32")
        return np.ascontiguousarray(np.asarray(array))

    def _matrix(self, layer: Any, path: str, head: int | None = None) -> WeightMatrix:
        """Return a layer's weight (or a head's of several), in low precision if that is allowed."""

        def parameter(array: Any) -> Any:
            return array if head is None else array[head]

        if "scales" in layer:
            return self._quantized_matrix(layer, path, parameter)
        weight = parameter(layer.weight)
        if self._low_precision and weight.dtype in (self.mx.float16, self.mx.bfloat16):
            return HalfMatrix(self._words(weight))
        return self._array(weight, path)  # type: ignore[no-any-return]

    def _quantized_matrix(
        self, layer: Any, path: str, parameter: Callable[[Any], Any]
    ) -> WeightMatrix:
        """Return a quantised weight. ``parameter`` selects a matrix from a layer's array."""
        mode, bits, group = layer.mode, layer.bits, layer.group_size
        if not self._low_precision or (mode == "affine" and not is_affine_format(bits, group)):
            raise NoCounterpart(
                f"{path} is quantised ({mode}, {bits} bits in groups of {group}), which the "
                "NumPy path does not read"
            )
        if isinstance(layer, self._block_layer):
            return BlockMatrix(layer.arrays())
        weight, stored_scales = parameter(layer.weight), parameter(layer.scales)
        words, scales = self._words(weight), self._words(stored_scales)
        if mode == "affine":
            biases = self._words(parameter(layer.biases))
            matrix = QuantizedMatrix(words, scales, biases, bits)
            if self._activations == "int8" and bits in int8_dot.BITS:
                self.int8_formats.add((matrix.kernel_format[0], bits, group))
            return matrix
        if mode == "mxfp4":
            return BlockMatrix(BlockArrays("mxfp4", words, {"scales": scales}))
        if mode == "nvfp4":
            # Halved, because the kernel's table has doubled values. Half an E4M3 number is exact in
            # float16.
            halved = self.mx.from_fp8(stored_scales, dtype=self.mx.float16) / 2
            return BlockMatrix(BlockArrays("nvfp4", words, {"scales": self._words(halved)}))
        # mxfp8: its numbers have 4 significant bits, so bfloat16 is exact.
        numbers = self.mx.dequantize(weight, stored_scales, group_size=group, bits=bits, mode=mode)
        return HalfMatrix(self._words(numbers))

    def _words(self, array: Any) -> NDArray[Any]:
        """Return a view of an MLX array. bfloat16, which NumPy lacks, is viewed as uint16."""
        if array.dtype == self.mx.bfloat16:
            array = array.view(self.mx.uint16)
        return np.ascontiguousarray(np.asarray(array))

    def _with_matrix(self, module: Any, path: str) -> Any:
        """Return the NumPy counterpart of a linear layer or an embedding."""
        weight: Any = self._matrix(module, path)
        layer: Any
        if type(module) in self._linear:
            bias = self._array(module.get("bias"), path)
            layer = numpy_layers.Linear(weight, bias, self._slabs, self._activations)
        elif type(module) in self._summed:
            add_up = partial(mlx_ring.all_sum, group=module.group)
            bias = self._array(module.get("bias"), path)
            layer = numpy_layers.SummedLinear(weight, bias, self._slabs, self._activations, add_up)
        elif isinstance(weight, np.ndarray):
            layer = numpy_layers.Embedding(weight)
        else:
            layer = numpy_layers.StoredEmbedding(weight, self._slabs, self._activations)
        self._weight_layers.append(layer)
        return layer

    def _layer(self, module: Any, path: str) -> Any:
        """Return the NumPy counterpart of a layer, or None for a module that contains layers."""
        nn, kind = self.nn, type(module)
        name = kind.__name__
        layer: Any
        if kind in (*self._linear, *self._summed, *self._embedding):
            layer = self._with_matrix(module, path)
        elif kind.__module__ == f"{PACKAGE}.mla":
            weights = [self._matrix(module, path, head) for head in range(len(module.weight))]
            layer = numpy_layers.MultiLinear(weights, self._slabs)
            self._weight_layers.append(layer)
        elif name.startswith("Quantized") or name.startswith("QQ"):
            raise NoCounterpart(f"{path} is a {name}, which has no NumPy counterpart")
        elif kind is nn.RMSNorm:
            weight = self._array(module.weight, path)
            layer = partial(norms.rms_norm, weight=weight, eps=module.eps)
        elif kind is nn.LayerNorm:
            weight = self._array(module.get("weight", self.mx.ones(module.dims)), path)
            bias = self._array(module.get("bias", self.mx.zeros(module.dims)), path)
            layer = partial(norms.layer_norm, weight=weight, bias=bias, eps=module.eps)
        elif kind is nn.RoPE or kind.__module__ == f"{PACKAGE}.rope_utils":
            layer = self._rope(module, path)
        elif kind is nn.SiLU:
            layer = ACTIVATIONS["silu"]
        elif kind is nn.ReLU:
            layer = ACTIVATIONS["relu"]
        elif kind is nn.GELU:
            layer = ACTIVATIONS["gelu" if module._act is nn.gelu else "gelu_approx"]
        else:
            return None
        self.converted[name] += 1
        return layer

    def _rope(self, module: Any, path: str) -> numpy_layers.RoPE:
        """Return the NumPy counterpart of a RoPE layer, with frequencies computed by MLX."""
        mx, name = self.mx, type(module).__name__
        scale, input_scale = 1.0, 1.0
        if name == "RoPE":
            half = module.dims // 2
            exponents = mx.arange(0, -half, -1, dtype=mx.float32)
            inverse = mx.exp(exponents * mx.array(np.log(module.base) / half, mx.float32))
            scale = float(module.scale)
        elif name in ("Llama3RoPE", "ProportionalRoPE", "YarnRoPE", "SuScaledRoPE"):
            inverse = mx.reciprocal(module._freqs)
            input_scale = float(getattr(module, "mscale", getattr(module, "_scale", 1.0)))
        else:
            raise NoCounterpart(f"{path} is a {name}, which has no NumPy counterpart")
        frequencies = np.asarray(inverse)
        key = (frequencies.tobytes(), scale)
        if key not in self._tables:
            self._tables[key] = RotaryTable(frequencies, scale)
        return numpy_layers.RoPE(
            self._tables[key], getattr(module, "traditional", False), input_scale
        )


class _TrialCache:
    """A layer's cache in the trial forward of two sequences with one token each."""

    packed = True
    offset = np.zeros(2, np.int32)

    def make_mask(self, *_args: Any, **_options: Any) -> None:
        """Return no mask."""

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[_TrialHandle, ValueHandle]:
        cache: Any = self
        handle = _TrialHandle(cache, keys, values)
        return handle, handle.value_handle


class _TrialHandle(KVHandle):
    """Stand-in for a ``KVHandle`` in the trial forward, whose context is one token.

    Attention then returns that token's V vector, repeated for each query head of the KV head.
    """

    def attend(
        self,
        queries: Array,
        values: Any,
        scale: float,
        mask: Any,
        sinks: Any,
        softcap: float | None = None,
    ) -> Array:
        latent = values is self
        value = self.keys if latent else self.values
        for array in (queries, self.keys, self.values, *((mask,) if latent else ())):
            _require_numpy(array, "the model's attention is given")
        if mask is not None and not latent:
            raise NoCounterpart("the model's attention builds a mask that labkit does not support")
        return np.repeat(value, queries.shape[1] // value.shape[1], axis=1)


def _require_numpy(array: Any, where: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        kind = getattr(array, "dtype", None) if isinstance(array, np.ndarray) else type(array)
        raise NoCounterpart(f"{where} {kind}, not a float32 NumPy array")


def _try_forward(model: Any, caches: int) -> None:
    ids = np.array([[0], [1]], np.int32)
    logits = model(ids, cache=[_TrialCache() for _ in range(caches)])
    _require_numpy(logits, "the model's forward returns")
    if logits.shape[:2] != (2, 1):
        raise NoCounterpart(
            f"the model's forward returns logits of shape {logits.shape} for ids of shape (2, 1), "
            "not (2, 1, vocabulary)"
        )
