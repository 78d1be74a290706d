"""What a budget must know of a model, read without loading it."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from labkit import config
from labkit.engine.compute_dtype import MatrixStorage

DEFAULT_GROUP_SIZE = 64  # mlx's, of quantised numbers that share a scale
FLOAT32_BYTES = 4  # bytes of a number in float32, in which sizes are counted first
# Bytes of what a safetensors header calls a number; any other takes one.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGER_BYTES = {"U64": 8, "I64": 8, "U32": 4, "I32": 4, "U16": 2, "I16": 2}
LM_HEAD = "lm_head"  # a matrix that turns the last hidden state into logits
# The types that weights can be cast to; None keeps each as it is stored.
CastDtype = str | None


@dataclass(frozen=True)
class ModelFootprint:
    """A model's sizes."""

    name: str  # what messages call it
    weight_bytes: int  # as loaded
    kv_bytes_per_token: int  # keys and values of one token in all layers, float32
    peak_live_floats: int  # that one token keeps alive at a forward's widest point
    vocab_size: int  # logits in a row
    max_context: int | None  # tokens it was trained for; None: config.json does not say
    float_bytes: int = FLOAT32_BYTES  # of a number that it computes with
    weights: int = 0  # numbers that its tensors stand for
    lookup_weights: int = 0  # numbers of an embedding that is no output's too: never multiplied by

    @property
    def matmul_weights(self) -> int:
        """Weights that every token is multiplied by; twice as many operations."""
        return self.weights - self.lookup_weights

    def activation_bytes(self, tokens: int, rows: int) -> int:
        """Estimate the peak of a forward over ``tokens`` tokens and ``rows`` rows of logits.

        The layers' arrays are gone when the logits are computed, so the larger of the two
        counts. Measured on two qwen3 shapes and four steps: within 6 %.
        """
        return self.float_bytes * max(tokens * self.peak_live_floats, rows * self.vocab_size)


def from_model(
    model: config.Model, kind: CastDtype = "float32", matrices: MatrixStorage = MatrixStorage.cast
) -> ModelFootprint | None:
    """Read the facts of a configured model; nothing is built or loaded.

    ``kind`` and ``matrices``: what becomes of its weights
    (``labkit.engine.compute_dtype``). Returns
    None where config.json does not tell enough to plan with.

    Raises
    ------
    ConfigError
        ``model.path`` is not a model directory.
    """
    if model.shape is not None:
        return from_shape(model.shape, model.name, kind)
    from labkit.models import resolve

    return from_directory(resolve(model).path, kind, matrices)


def from_shape(shape: config.ModelShape, name: str, kind: CastDtype = "float32") -> ModelFootprint:
    """Count what a model built from ``shape`` (a qwen3 with a head of its own) holds.

    It is built in float32.
    """
    size = _number_bytes("F32", kind)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys) + 2 * shape.head_dim
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    vocabulary = shape.vocab_size * shape.hidden_size
    weights = 2 * vocabulary + shape.hidden_size + shape.num_layers * layer
    return ModelFootprint(
        name=name,
        weight_bytes=size * weights,
        kv_bytes_per_token=FLOAT32_BYTES * shape.num_layers * 2 * keys,
        peak_live_floats=_peak_live_floats(
            shape.hidden_size, queries, keys, shape.intermediate_size
        ),
        vocab_size=shape.vocab_size,
        max_context=40960,
        float_bytes=size,
        weights=weights,
        lookup_weights=vocabulary,
    )


def from_directory(
    path: Path, kind: CastDtype = "float32", matrices: MatrixStorage = MatrixStorage.cast
) -> ModelFootprint | None:
    """Read config.json and the headers of the weights in ``path``.

    Returns None where they do not tell enough; loading says what is wrong, if anything.
    """
    try:
        outer = json.loads((path / "config.json").read_text(encoding="utf-8"))
        settings = {**outer, **(outer.get("text_config") or {})}
        return _from_config(settings, path, _WeightLoading(kind, matrices))
    except (OSError, LookupError, TypeError, ValueError, AttributeError, struct.error):
        return None


def _from_config(
    settings: dict[str, Any], path: Path, loading: _WeightLoading
) -> ModelFootprint | None:
    if "kv_lora_rank" in settings:  # caches latents, not keys and values of heads
        return None
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    keys = int(settings.get("num_key_value_heads") or heads)
    head_dim = int(settings.get("head_dim") or hidden // heads)
    inner = int(settings["intermediate_size"])
    context = settings.get("max_position_embeddings")
    vocabulary = int(settings["vocab_size"])
    tied = bool(settings.get("tie_word_embeddings"))
    held = _loaded_weights(path, loading, settings.get("quantization") or {}, tied)
    return ModelFootprint(
        name=path.name,
        weight_bytes=held.bytes,
        kv_bytes_per_token=FLOAT32_BYTES * int(settings["num_hidden_layers"]) * 2 * keys * head_dim,
        peak_live_floats=_peak_live_floats(hidden, heads * head_dim, keys * head_dim, inner),
        vocab_size=vocabulary,
        max_context=context if isinstance(context, int) else None,
        float_bytes=held.float_bytes,
        weights=held.numbers,
        lookup_weights=vocabulary * hidden if held.own_head else 0,
    )


def from_weights(
    path: Path, kind: CastDtype = "float32", matrices: MatrixStorage = MatrixStorage.cast
) -> ModelFootprint:
    """Count the weights in ``path`` where config.json tells no more.

    Raises
    ------
    ConfigError
        They are no safetensors.
    """
    try:
        held = _loaded_weights(path, _WeightLoading(kind, matrices), {})
    except (LookupError, TypeError, ValueError, struct.error):
        raise config.ConfigError(f"{path}: model*.safetensors cannot be read") from None
    return ModelFootprint(path.name, held.bytes, 0, 0, 0, None, held.float_bytes, held.numbers)


def weight_formats(
    model: config.Model, kind: CastDtype = "float32", matrices: MatrixStorage = MatrixStorage.cast
) -> frozenset[str]:
    """Name what the weights of a configured model will be held in, as counters have it.

    Norms and biases count too. Empty where no header can be read; loading says why.

    Raises
    ------
    ConfigError
        ``model.path`` is not a model directory.
    """
    loading = _WeightLoading(kind, matrices)
    if model.shape is not None:
        return frozenset(
            {loading.form(_TensorHeader("F32", 1, 1, quantised=False, of_matrix=True))}
        )
    from labkit.models import resolve

    try:
        found = _tensor_headers(_tensor_shapes(resolve(model).path), {})
        return frozenset(loading.form(tensor) for _, tensor in found)
    except (LookupError, TypeError, ValueError, struct.error):
        return frozenset()


def with_kv_bytes(model: ModelFootprint, kv_bytes_per_token: int) -> ModelFootprint:
    """Return ``model`` with the KV bytes that its loaded layers really cache."""
    return replace(model, kv_bytes_per_token=kv_bytes_per_token)


def _peak_live_floats(hidden: int, queries: int, keys: int, inner: int) -> int:
    """Count the widest point of a layer: of attention and MLP the wider.

    Four arrays as wide as the residual; beside them queries before and after RoPE, keys,
    values and the output, or the MLP's gate, up and their product.
    """
    return 4 * hidden + max(3 * queries + 3 * keys, 3 * inner)


@dataclass(frozen=True)
class _WeightLoading:
    """What loading does to weights."""

    kind: CastDtype
    matrices: MatrixStorage

    def bytes(self, tensor: _TensorHeader) -> int:
        """Return the bytes of a tensor, as loaded."""
        if self.matrices is MatrixStorage.dequantized and tensor.quantised:
            return FLOAT32_BYTES * tensor.numbers
        return tensor.size * _number_bytes(tensor.word, self._kind_of(tensor))

    def form(self, tensor: _TensorHeader) -> str:
        """Name what a tensor is held in, as loaded; as counters have it."""
        if self.matrices is MatrixStorage.dequantized and tensor.quantised:
            return "float32"
        if tensor.word not in FLOAT_BYTES:
            return "quantised" if tensor.quantised else tensor.word
        return self._kind_of(tensor) or FLOAT_NAMES[tensor.word]

    def _kind_of(self, tensor: _TensorHeader) -> CastDtype:
        """Return the type that a tensor's numbers are cast to; None: they stay."""
        return None if self.matrices is MatrixStorage.as_stored and tensor.of_matrix else self.kind


@dataclass(frozen=True)
class _TensorHeader:
    """What a safetensors header says of a tensor, and what it stands for.

    ``numbers``: weights, which the scales and biases of quantised ones are not.
    """

    word: str
    size: int
    numbers: int
    quantised: bool
    of_matrix: bool


@dataclass(frozen=True)
class _LoadedWeights:
    """Weights as loaded: their bytes, and those of one of their floating point numbers."""

    bytes: int
    float_bytes: int
    numbers: int
    own_head: bool


def _loaded_weights(
    path: Path, loading: _WeightLoading, quantization: dict[str, Any], tied: bool = False
) -> _LoadedWeights:
    """Count the weights in ``path``.

    Where the embedding is ``tied`` to the output, mlx_lm drops an output matrix that is stored
    all the same.
    """
    found = {
        name: tensor
        for name, tensor in _tensor_headers(_tensor_shapes(path), quantization)
        if not (tied and _is_lm_head(name))
    }
    floats = Counter[str]()
    for tensor in found.values():
        floats[tensor.word] += tensor.size if tensor.word in FLOAT_BYTES else 0
    largest = max(floats, key=lambda word: floats[word], default="F32")
    computed = largest if largest in FLOAT_BYTES else "F32"
    return _LoadedWeights(
        bytes=sum(map(loading.bytes, found.values())),
        float_bytes=_number_bytes(computed, loading.kind),
        numbers=sum(tensor.numbers for tensor in found.values()),
        own_head=any(map(_is_lm_head, found)),
    )


def _is_lm_head(name: str) -> bool:
    return name.rpartition(".")[0].endswith(LM_HEAD)


def _tensor_headers(
    shapes: dict[str, tuple[str, tuple[int, ...]]], quantization: dict[str, Any]
) -> Iterator[tuple[str, _TensorHeader]]:
    for name, (word, shape) in shapes.items():
        layer, _, part = name.rpartition(".")
        quantised = f"{layer}.scales" in shapes and part in ("weight", "scales", "biases")
        size = numbers = prod(shape)
        if quantised:
            own = quantization.get(layer)
            group = (own if isinstance(own, dict) else quantization).get(
                "group_size", DEFAULT_GROUP_SIZE
            )
            numbers = prod(shapes[f"{layer}.scales"][1]) * int(group) if part == "weight" else 0
        matrix = quantised or (part == "weight" and len(shape) == 2)
        yield name, _TensorHeader(word, size, numbers, quantised, matrix)


def _number_bytes(word: str, kind: CastDtype) -> int:
    """Return the bytes of a number of a safetensors type, as loaded."""
    if word not in FLOAT_BYTES:
        return INTEGER_BYTES.get(word, 1)
    return (
        FLOAT_BYTES[word]
        if kind is None
        else FLOAT32_BYTES
        if kind == "float32"
        else FLOAT32_BYTES // 2
    )


def _tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map name to type and shape of every tensor in ``path``."""
    return dict(entry for file in path.glob("model*.safetensors") for entry in _file_shapes(file))


def _file_shapes(file: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield name, type and shape of what a safetensors file holds, by its header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, (entry["dtype"], tuple(entry["shape"]))
