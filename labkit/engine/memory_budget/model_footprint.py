"""A model's sizes for memory planning, read from config.json and tensor headers alone."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from labkit import config
from labkit.cpu.precision.gguf_block_formats import is_gguf_only
from labkit.engine.model.dtype_resolution import FLOAT32, MatrixStorage, WeightLoading
from labkit.models import model_json, safetensors_header

DEFAULT_GROUP_SIZE = 64  # quantised weights that share a scale, by MLX's default
FLOAT32_BYTES = 4
# Bytes per element by safetensors dtype; a dtype in neither table takes one byte.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGER_BYTES = {"U64": 8, "I64": 8, "U32": 4, "I32": 4, "U16": 2, "I16": 2}
# The arrays of a quantised matrix: integers and scales.
QUANTIZED_PARTS = ("weight", "scales", "biases", "mins", "super_scales", "super_mins")
LM_HEAD = "lm_head"  # the matrix that turns the last hidden state into logits
# Names of the tensors of experts, and of their number in config.json.
EXPERTS = re.compile(r"\.(experts|switch_mlp)\.")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelFootprint:
    """A model's sizes after loading: its weights, KV cache and activations."""

    name: str  # for messages
    weight_bytes: int  # after loading
    kv_bytes_per_token: int  # one token's keys and values in all layers; float32 until replaced
    peak_live_floats: int  # activation elements per token at a forward's widest point
    vocab_size: int  # logits in a row
    max_context: int | None  # tokens of the trained context; None: config.json has no such entry
    float_bytes: int = FLOAT32_BYTES  # bytes per element of the activations
    weights: int = 0  # number of weights
    # Weights that a token is not multiplied by: an untied embedding, experts that it does not use.
    lookup_weights: int = 0
    state_bytes: int = 0  # one request's recurrent states in all layers
    # False: kv_bytes_per_token is an estimate, and the states are not counted.
    is_cache_known: bool = True
    # Of each layer, in tokens (None: the layer sees all keys). None: unknown, or no layer has one.
    windows: tuple[int | None, ...] | None = None
    draft_bytes: int = 0  # the weights of the draft model, after loading

    @property
    def matmul_weights(self) -> int:
        """Number of weights that multiply each token (two floating-point operations per weight)."""
        return self.weights - self.lookup_weights

    def activation_bytes(self, tokens: int, rows: int) -> int:
        """Estimate the peak bytes of a forward over ``tokens`` tokens and ``rows`` rows of logits.

        The layers' arrays are freed before the logits are computed, so the estimate is the larger
        of the layers' peak and the logits. On two qwen3 shapes with four steps, the estimate was
        within 6 % of the measured peak.
        """
        return self.float_bytes * max(tokens * self.peak_live_floats, rows * self.vocab_size)


def from_model(model: config.Model, loading: WeightLoading = FLOAT32) -> ModelFootprint | None:
    """Return the footprint of a configured model without building or loading the model.

    Returns None if config.json lacks a size that planning needs. Raises ``ConfigError`` if
    ``model.path`` is not a model directory.
    """
    if model.shape is not None:
        return from_shape(model.shape, model.name, loading)
    from labkit.models import resolve

    return from_directory(resolve(model).path, loading)


def from_shape(
    shape: config.ModelShape, name: str, loading: WeightLoading = FLOAT32
) -> ModelFootprint:
    """Return the footprint of a float32 model with an untied head, cast as it is loaded."""
    from labkit.models.synthetic import tensor_shapes as sizes

    if loading.layers is not None:
        shape = copy.copy(shape)  # without its checks, since a window needs a second layer
        shape.num_layers = loading.layers
    size = _number_bytes("F32", loading.dtype)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    cached = 2 * keys
    if shape.kv_lora_rank is not None:
        cached = keys = sizes.latent_dim(shape)
        queries = shape.num_heads * cached
    windows = None
    if (window := shape.sliding_window) is not None:
        has_window = map(shape.has_window, range(shape.num_layers))
        windows = tuple(window if has else None for has in has_window)
    inner = shape.intermediate_size * (1 if shape.num_experts is None else sizes.EXPERTS_PER_TOKEN)
    weights = sizes.num_weights(shape)
    return ModelFootprint(
        name=name,
        weight_bytes=size * weights,
        kv_bytes_per_token=FLOAT32_BYTES * sizes.num_attention_layers(shape) * cached,
        peak_live_floats=_peak_live_floats(shape.hidden_size, queries, keys, inner),
        vocab_size=shape.vocab_size,
        max_context=40960,
        float_bytes=size,
        weights=weights,
        lookup_weights=sizes.num_unused_weights(shape),
        state_bytes=sizes.state_bytes(shape),
        windows=windows,
    )


def from_directory(path: Path, loading: WeightLoading = FLOAT32) -> ModelFootprint | None:
    """Return a directory's footprint, or None if its headers lack a size (loading reports it)."""
    try:
        outer = json.loads((path / "config.json").read_text(encoding="utf-8"))
        settings = {**outer, **(outer.get("text_config") or {})}
        settings["num_hidden_layers"] = loading.layers or settings["num_hidden_layers"]
        return _from_config(settings, path, loading)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None


def _from_config(
    settings: dict[str, Any], path: Path, loading: WeightLoading
) -> ModelFootprint | None:
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    keys = int(settings.get("num_key_value_heads") or heads)
    head_dim = int(settings.get("head_dim") or hidden // heads)
    inner = int(settings["intermediate_size"])
    cached = _cached_numbers(settings, keys, head_dim)
    if cached is None:
        return None
    vocabulary = int(settings["vocab_size"])
    weights, has_lm_head = _loaded_weights(path, loading, settings)
    return replace(
        weights,
        kv_bytes_per_token=FLOAT32_BYTES * int(settings["num_hidden_layers"]) * cached,
        peak_live_floats=_peak_live_floats(hidden, heads * head_dim, keys * head_dim, inner),
        vocab_size=vocabulary,
        max_context=model_json.max_context(settings),
        lookup_weights=weights.lookup_weights + vocabulary * hidden * has_lm_head,
        is_cache_known=str(settings.get("model_type")).removesuffix("_text") not in UNEVEN_TYPES,
    )


# mlx_lm's architectures with ``kv_lora_rank`` in every layer. The first group caches the latent and
# the rotary part of a key. The second group caches the expanded keys and values of all heads.
LATENT_TYPES = ("deepseek_v3", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2", "mistral4")
EXPANDED_TYPES = ("deepseek_v2", "minicpm3", "youtu_llm")
# Those whose layers do not all cache keys and values of ``num_key_value_heads`` heads: some have a
# recurrent state, share keys and values, or have heads of another number or size.
UNEVEN_TYPES = (
    "bailing_moe_linear", "falcon_h1", "gemma3n", "gemma4", "granitemoehybrid", "iquestloopcoder",
    "jamba", "lfm2", "lfm2_moe", "mimo_v2_flash", "nemotron_h", "olmo_hybrid", "plamo", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "step3p5",
)  # fmt: skip


def _cached_numbers(settings: dict[str, Any], keys: int, head_dim: int) -> int | None:
    """Return the number of elements that a layer caches per token, or None if it is unknown."""
    if "kv_lora_rank" not in settings:
        return 2 * keys * head_dim
    rotary, kind = int(settings["qk_rope_head_dim"]), settings.get("model_type")
    if kind in LATENT_TYPES:
        return int(settings["kv_lora_rank"]) + rotary
    if kind in EXPANDED_TYPES:
        heads = int(settings["num_attention_heads"])
        values = int(settings.get("v_head_dim") or int(settings["hidden_size"]) // heads)
        return heads * (int(settings["qk_nope_head_dim"]) + rotary + values)
    return None


def from_weights(path: Path, loading: WeightLoading = FLOAT32) -> ModelFootprint:
    """Return a footprint with the weights' sizes alone, for a config.json that lacks sizes.

    ``kv_bytes_per_token``, ``peak_live_floats`` and ``vocab_size`` are 0. Raises ``ConfigError`` if
    the weights are not readable as safetensors.
    """
    try:
        return _loaded_weights(path, loading, {})[0]
    except (LookupError, TypeError, ValueError):
        raise config.ConfigError(f"{path}: model*.safetensors cannot be read") from None


def weight_formats(model: config.Model, loading: WeightLoading) -> frozenset[str]:
    """Return the formats that a configured model's weights have after loading.

    Example: ``{"float32", "quantised"}``, the names in the counters ``weights.<format>``. The
    formats of norms and biases are included. The set is empty if the safetensors headers cannot be
    read; loading the model reports the error. Raises ``ConfigError`` if ``model.path`` is not a
    model directory.
    """
    if model.shape is not None:
        matrix = _TensorHeader("F32", 1, 1, quantised=False, of_matrix=True)
        return frozenset({matrix.loaded_format(loading)})
    from labkit.models import resolve

    try:
        path = resolve(model).path
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
        headers = _tensor_headers(_tensor_shapes(path), settings.get("quantization") or {})
        return frozenset(tensor.loaded_format(loading) for _, tensor in headers)
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return frozenset()


def with_draft(model: ModelFootprint, draft: ModelFootprint) -> ModelFootprint:
    """Return ``model`` with the weights of its draft model, and its layers' keys and values."""
    return replace(
        model,
        draft_bytes=draft.weight_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token + draft.kv_bytes_per_token,
        is_cache_known=model.is_cache_known and draft.is_cache_known,
    )


def _peak_live_floats(hidden: int, queries: int, keys: int, inner: int) -> int:
    """Return the number of activation elements per token in memory at a layer's widest point.

    They are four arrays as wide as the residual, plus the larger of attention (queries before and
    after RoPE, keys, values, output) and MLP (gate, up and their product).
    """
    return 4 * hidden + max(3 * queries + 3 * keys, 3 * inner)


@dataclass(frozen=True)
class _TensorHeader:
    """One entry of a safetensors header.

    ``size`` is the number of stored elements, ``weights`` the number of weights that they encode (0
    for the scales and biases of a quantised matrix). ``of_matrix`` says whether the tensor is a 2-D
    weight or a part of a quantised matrix. ``mode`` is the quantisation mode of the matrix, if
    config.json states it.
    """

    dtype: str
    size: int
    weights: int
    quantised: bool
    of_matrix: bool
    mode: str | None = None

    def loaded_bytes(self, loading: WeightLoading) -> int:
        if self._is_widened(loading):
            return FLOAT32_BYTES * self.weights
        return self.size * _number_bytes(self.dtype, self._cast_dtype(loading))

    def loaded_format(self, loading: WeightLoading) -> str:
        """Return the format after loading, the name in the counter ``weights.<format>``."""
        if self._is_widened(loading):
            return "float32"
        if self.dtype not in FLOAT_BYTES:
            return "quantised" if self.quantised else self.dtype
        return self._cast_dtype(loading) or FLOAT_NAMES[self.dtype]

    def _is_widened(self, loading: WeightLoading) -> bool:
        """Return whether a quantised matrix becomes float32.

        With ``matrix_storage=dequantized`` every quantised matrix does. With ``cast`` a matrix does
        if it is in a GGUF block format that MLX lacks. (A few of these formats become integers with
        float32 scales instead, so their size is overestimated.)
        """
        widens = loading.matrix_storage is MatrixStorage.dequantized or (
            loading.matrix_storage is MatrixStorage.cast and is_gguf_only(self.mode)
        )
        return self.quantised and widens

    def _cast_dtype(self, loading: WeightLoading) -> str | None:
        keeps_dtype = loading.matrix_storage is MatrixStorage.as_stored and self.of_matrix
        return None if keeps_dtype else loading.dtype


def _loaded_weights(
    path: Path, loading: WeightLoading, settings: dict[str, Any]
) -> tuple[ModelFootprint, bool]:
    """Return a footprint with the sizes of the weights in ``path`` and whether there is an LM head.

    ``settings``: config.json. The activations have the dtype of most floating-point weights after
    the cast. If the embedding is tied to the output, a stored output matrix is not counted: mlx_lm
    drops it on loading.
    """
    quantization, tied = settings.get("quantization") or {}, settings.get("tie_word_embeddings")
    tensors = {
        name: tensor
        for name, tensor in _tensor_headers(_tensor_shapes(path), quantization)
        if loading.layers is None or safetensors_header.layer_index(name) < loading.layers
        if not (tied and _is_lm_head(name))
    }
    floats = Counter[str]()
    for tensor in tensors.values():
        floats[tensor.dtype] += tensor.size if tensor.dtype in FLOAT_BYTES else 0
    most_used = max(floats, key=lambda dtype: floats[dtype], default="F32")
    compute_dtype = most_used if most_used in FLOAT_BYTES else "F32"
    size = sum(tensor.loaded_bytes(loading) for tensor in tensors.values())
    float_bytes = _number_bytes(compute_dtype, loading.dtype)
    count = sum(tensor.weights for tensor in tensors.values())
    experts = sum(tensor.weights for name, tensor in tensors.items() if EXPERTS.search(name))
    unused = round(experts * _unused_experts(settings))
    footprint = ModelFootprint(path.name, size, 0, 0, 0, None, float_bytes, count, unused)
    return footprint, any(map(_is_lm_head, tensors))


def _unused_experts(settings: dict[str, Any]) -> float:
    """Return the share of a layer's experts that a token does not use, or 0 if it is unknown."""
    total = next(filter(None, map(settings.get, EXPERT_COUNTS)), None)
    used = settings.get("num_experts_per_tok")
    return 1 - int(used) / int(total) if used and total else 0.0


def _is_lm_head(name: str) -> bool:
    return name.rpartition(".")[0].endswith(LM_HEAD)


def _tensor_headers(
    shapes: dict[str, tuple[str, tuple[int, ...]]], quantization: dict[str, Any]
) -> Iterator[tuple[str, _TensorHeader]]:
    for name, (dtype, shape) in shapes.items():
        layer, _, part = name.rpartition(".")
        quantised = f"{layer}.scales" in shapes and part in QUANTIZED_PARTS
        size = weights = prod(shape)
        own = quantization.get(layer)
        entry = own if isinstance(own, dict) else quantization
        if quantised:
            group = int(entry.get("group_size", DEFAULT_GROUP_SIZE))
            weights = prod(shapes[f"{layer}.scales"][1]) * group if part == "weight" else 0
        matrix = quantised or (part == "weight" and len(shape) == 2)
        yield name, _TensorHeader(dtype, size, weights, quantised, matrix, entry.get("mode"))


def _number_bytes(dtype: str, cast_dtype: str | None) -> int:
    """Return the bytes per element after loading a tensor of a safetensors dtype."""
    if dtype not in FLOAT_BYTES:
        return INTEGER_BYTES.get(dtype, 1)
    if cast_dtype is None:
        return FLOAT_BYTES[dtype]
    return FLOAT32_BYTES if cast_dtype == "float32" else FLOAT32_BYTES // 2


def _tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor in the headers of a model's files."""
    return {
        name: (entry["dtype"], tuple(entry["shape"]))
        for file in path.glob("model*.safetensors")
        for name, entry in safetensors_header.read_header(file)[0].items()
    }
