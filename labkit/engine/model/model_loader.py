"""Load a model directory into mlx_lm's model class, with an attention that labkit can replace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.config import ConfigError
from labkit.cpu.precision.gguf_block_formats import BLOCK_FORMATS, is_gguf_only
from labkit.engine.engine_protocol import EngineError
from labkit.engine.model.dtype_resolution import (
    FLOAT32,
    MatrixStorage,
    WeightLoading,
    cast_parameters,
)
from labkit.engine.model.isolated_model_modules import PACKAGE, ModuleLoader, import_plain
from labkit.engine.model.layer_cache import AttentionSpec, CacheSpec, KVHandle, StateSpec
from labkit.machine.exception_text import one_line
from labkit.models import eos_token_ids, model_directory, model_json
from labkit.models.safetensors_header import layer_index

# mlx_lm's module for a ``model_type`` of config.json, if their names differ.
MODULE_OF_TYPE = {
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
    "xverse": "llama",
}
# The same for a ``model_type`` and one of the ``architectures``; it goes first.
MODULE_OF_ARCHITECTURE = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}
# Quantisation modes of layers: MLX's own, and the block formats of GGUF.
QUANTIZATION_MODES = ("affine", "mxfp4", "nvfp4", "mxfp8", *BLOCK_FORMATS)
# mlx_lm's caches with one key and one value per token, which a paged pool can store.
PLAIN_CACHES = ("KVCache", "RotatingKVCache")
# What layers with a cache of another class do that labkit's attention does not.
UNSUPPORTED_CACHES = {
    "ChunkedKVCache": "attend within chunks of a fixed length (attention_chunk_size)",
    "LayerCache": "attend to compressed groups of tokens beside a window",
}
# What to set for a model that mlx_lm's BatchGenerator cannot batch.
ONE_AT_A_TIME = (
    "set engine=openai engine.server.preset=mlx_lm, whose server computes one request at a time"
)
MAX_NAMES = 4  # of parameters in a message
# What a model class of mlx_lm raises if config.json does not describe a whole model.
CONFIG_MISTAKES = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)
# Settings of models in which an indexer selects the keys that a query attends to.
INDEXER_SETTINGS = ("index_topk", "index_topk_blocks")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model."""

    model: Any  # mlx_lm's model
    model_type: str  # ``model_type`` of config.json
    caches: tuple[CacheSpec, ...]  # what each layer with a cache stores in it
    eos_token_ids: frozenset[int]  # token ids that end a request
    # How loading stored the matrices of linear layers and embeddings
    matrix_storage: MatrixStorage = MatrixStorage.cast
    max_context: int | None = None  # the context in tokens, or None if config.json has none
    # The number of layers whose outputs are summed over the ranks (tensor parallelism)
    num_all_reduces: int = 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window in tokens (None: no window) of each layer with keys and values."""
        specs = _leaves(self.caches)
        return tuple(spec.window for spec in specs if isinstance(spec, AttentionSpec))


def _leaves(specs: Sequence[CacheSpec]) -> Iterator[AttentionSpec | StateSpec]:
    for spec in specs:
        if isinstance(spec, tuple):
            yield from _leaves(spec)
        else:
            yield spec


@functools.cache
def _modules() -> ModuleLoader:
    """Return the loader of mlx_lm's model modules. Their attention calls ``KVHandle.attend``.

    Keys that are not a ``KVHandle`` are passed to mlx_lm's own function, so a model also runs with
    mlx_lm's caches. The modules have no state, so any number of engines share them. They are never
    freed. Otherwise MLX could run the graph of a freed compiled function in place of a function
    that is compiled later at the same address (see ``compiled_feed_forward``).
    """
    original = import_plain("base").scaled_dot_product_attention

    def attend(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        if isinstance(keys, KVHandle):
            return keys.attend(queries, values, scale, mask, sinks)
        if record := getattr(cache, "record_attention", None):
            record(keys, values)
        return original(queries, keys, values, cache, scale, mask, sinks=sinks)

    return ModuleLoader({}, {f"{PACKAGE}.base": {"scaled_dot_product_attention": attend}})


def load_model(model_dir: Path, loading: WeightLoading = FLOAT32) -> LoadedModel:
    """Load a model from config.json and model*.safetensors.

    Raises ``EngineError`` if the directory is not a model, or its architecture or quantisation is
    not supported.
    """
    settings = _without_dynamic_rope(_read_config(model_dir))
    if loading.layers is not None:
        settings = _first_layers(settings, loading.layers, model_dir)
    model_type = str(settings["model_type"])
    model = _build(_module(model_type, settings.get("architectures")), settings, model_dir)
    _load_weights(model, model_dir, settings.get("quantization"), loading.layers)
    cast_parameters(model, loading)
    caches = tuple(_cache_spec(cache, model_type) for cache in make_prompt_cache(model))
    _check_indexer(caches, settings, model_type)
    return LoadedModel(
        model,
        model_type,
        caches,
        read_eos_token_ids(model_dir),
        loading.matrix_storage,
        model_json.max_context(settings),
    )


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    with config_errors():
        settings = model_json.decode_tagged_floats(model_json.read_object(path))
    if "model_type" not in settings:
        raise EngineError(f"{path} has no model_type")
    _check_quantisation(settings, path)
    return dict(settings)


def _without_dynamic_rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a model's settings without a dynamic scaling of RoPE.

    It changes positions beyond ``max_position_embeddings`` only, and no request gets that long.
    mlx_lm's module for it has no offset per token, which a packed forward needs. Hunyuan's dynamic
    scaling by ``alpha`` stays, because it changes every position.
    """
    scaling = settings.get("rope_scaling")
    if not model_json.has_scaling(scaling, "dynamic") or "alpha" in scaling:
        return settings
    return {**settings, "rope_scaling": None}


def _check_quantisation(settings: dict[str, Any], path: Path) -> None:
    """Raise ``EngineError`` if the weights are quantised in a format that is not supported."""
    text = settings.get("text_config") or {}
    own = settings.get("quantization")
    foreign = settings.get("quantization_config") or text.get("quantization_config")
    if not own and (foreign or text.get("quantization")):
        raise EngineError(
            f"{path}: the model is quantised, but not by mlx_lm; convert it with mlx_lm.convert"
        )
    if own and settings.get("quantize_activations"):
        raise EngineError(
            f"{path}: quantize_activations is set, and engine=paged does not quantise activations "
            "as mlx_lm does; set engine=mlx_lm"
        )
    layers = {name: value for name, value in (own or {}).items() if isinstance(value, dict)}
    for where, layer in {"": own or {}, **layers}.items():
        if layer.get("mode", "affine") not in QUANTIZATION_MODES:
            of = f" of layer {where}" if where else ""
            raise EngineError(
                f"{path}: quantisation mode {layer['mode']}{of}; must be one of: "
                f"{', '.join(QUANTIZATION_MODES)}"
            )


def _module(model_type: str, architectures: str | Sequence[str] | None = None) -> ModuleType:
    classes = [architectures] if isinstance(architectures, str) else architectures or []
    by_class = (MODULE_OF_ARCHITECTURE.get((model_type, one)) for one in classes)
    of_type = MODULE_OF_TYPE.get(model_type, model_type)
    name = f"{PACKAGE}.{next(filter(None, by_class), of_type)}"
    try:
        return _modules().load(name)
    except ModuleNotFoundError as error:
        if error.name == "mlx_lm":
            raise EngineError(str(error)) from None
        if error.name != name:
            raise
        raise EngineError(f"model_type={model_type}: mlx_lm has no such architecture") from None
    except SystemExit:  # mlx_lm's olmo calls sys.exit() if hf_olmo is not installed
        raise EngineError(
            f"model_type={model_type}: mlx_lm needs a Python package that is not installed"
        ) from None


def _build(module: ModuleType, settings: dict[str, Any], model_dir: Path) -> Any:
    try:
        return module.Model(module.ModelArgs.from_dict(settings))
    except CONFIG_MISTAKES as error:
        reason = one_line(error)
        raise EngineError(
            f"{model_dir / 'config.json'} does not describe a whole model ({reason})"
        ) from None


def _first_layers(settings: dict[str, Any], layers: int, model_dir: Path) -> dict[str, Any]:
    num_layers = settings.get("num_hidden_layers")
    if not isinstance(num_layers, int) or layers > num_layers:
        raise EngineError(
            f"engine.drafts.draft_layers={layers}: must be at most num_hidden_layers={num_layers} "
            f"of {model_dir / 'config.json'}"
        )
    return {**settings, "num_hidden_layers": layers}


def _load_weights(
    model: Any, model_dir: Path, quantization: dict[str, Any] | None, layers: int | None
) -> None:
    import mlx.core as mx

    weights: dict[str, Any] = {}
    with config_errors():
        files = model_directory.find_weights(model_dir, str(model_dir))
    for file in files:
        try:
            loaded: Any = mx.load(str(file))
        except RuntimeError as error:  # such as a type that MLX does not have
            raise EngineError(f"{file}: {one_line(error)}") from None
        weights.update(loaded)
    if layers is not None:
        weights = {name: value for name, value in weights.items() if layer_index(name) < layers}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if quantization:
        weights = _quantise(model, weights, quantization)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise EngineError(f"{model_dir}: {some_names(error)}") from None
    model.eval()


def some_names(error: Exception) -> str:
    """Return MLX's message about wrong parameters in one line, with the first of their names."""
    first, *names = str(error).splitlines() or [type(error).__name__]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return " ".join([first.strip(), *names[:MAX_NAMES]]).rstrip(",") + more


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Raise a ``ConfigError`` about a file of the model as an ``EngineError``."""
    try:
        yield
    except ConfigError as error:
        raise EngineError(str(error)) from None


def _quantise(model: Any, weights: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """Replace each layer that has quantised weights by its quantised class.

    Returns the weights that these layers load. Stacked matrices of experts in a block format are
    converted for MLX's layers, because there is no block layer with a matrix per expert.
    """
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path

    from labkit.engine.model import gguf_block_layers

    entries = {name: entry for name, entry in quantization.items() if isinstance(entry, dict)}
    leaves = model.leaf_modules()
    in_blocks: dict[str, str] = {}

    def replace(path: str, layer: Any) -> Any:
        nonlocal weights
        mode = str(entries.get(path, {}).get("mode"))
        if not is_gguf_only(mode):
            return layer
        in_blocks[path] = mode
        if weights[f"{path}.weight"].ndim == 2:
            return gguf_block_layers.block_layer(layer, mode)
        weights = gguf_block_layers.with_mlx_weights(weights, path, mode)
        entry = gguf_block_layers.mlx_quantization(mode)
        return layer.to_quantized(**entry) if entry is not None else layer

    model.update_modules(tree_map_with_path(replace, leaves, is_leaf=nn.Module.is_module))

    def options(path: str, layer: Any) -> Any:
        if path in in_blocks or not hasattr(layer, "to_quantized"):
            return False
        if path in entries:
            return entries[path]
        return f"{path}.scales" in weights and _inferred_quantization(path, layer, weights)

    nn.quantize(
        model, quantization.get("group_size"), quantization.get("bits"), class_predicate=options
    )
    return weights


def _inferred_quantization(path: str, layer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Infer a layer's bits, group size and mode from its arrays, if config.json has no entry.

    Only the mode ``affine`` has scales in floating point. Each other mode has a fixed number of
    bits and a fixed group size.
    """
    import mlx.core as mx

    depth, scales = layer.weight.shape[-1], weights[f"{path}.scales"]
    pair = weights[f"{path}.weight"].shape[-1] * 32 // depth, depth // scales.shape[-1]
    modes = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
    if scales.dtype == mx.uint8 and pair not in modes:
        raise EngineError(
            f"layer {path} has {pair[0]} bits in groups of {pair[1]}; no mode of MLX has these"
        )
    mode = modes[pair] if scales.dtype == mx.uint8 else "affine"
    entry = {"bits": pair[0], "group_size": pair[1], "mode": mode}
    return {**entry, "global_scale": True} if f"{path}.global_scale" in weights else entry


def _cache_spec(cache: Any, model_type: str) -> CacheSpec:
    """Return what a layer caches, read from the cache that mlx_lm would use for it.

    Raises ``EngineError`` if the class of the cache is not supported, or its sliding window keeps
    the first tokens. The supported classes are ``PLAIN_CACHES``, ``ArraysCache`` (a state), and a
    ``CacheList`` of these.
    """
    class_name = type(cache).__name__
    if class_name == "ArraysCache":
        return StateSpec(len(cache.cache))
    if class_name == "CacheList":
        return tuple(_cache_spec(part, model_type) for part in cache.caches)
    if class_name not in PLAIN_CACHES:
        does = UNSUPPORTED_CACHES.get(class_name, "do not cache one key and one value per token")
        remedy = "set engine=mlx_lm" if is_batchable(cache) else ONE_AT_A_TIME
        raise EngineError(
            f"model_type={model_type}: its layers {does} (mlx_lm's {class_name}), which no "
            f"attention of labkit computes; {remedy}"
        )
    if getattr(cache, "keep", 0):
        raise EngineError(
            f"model_type={model_type}: its sliding windows always keep the first {cache.keep} "
            "tokens, which engine=paged cannot do; set engine=mlx_lm"
        )
    return AttentionSpec(int(cache.max_size) if class_name == "RotatingKVCache" else None)


def _check_indexer(caches: Sequence[CacheSpec], settings: dict[str, Any], model_type: str) -> None:
    """Raise ``EngineError`` if an indexer selects the keys that a query attends to."""
    settings = settings | (settings.get("text_config") or {})
    for name in INDEXER_SETTINGS:
        if settings.get(name) and any(isinstance(spec, tuple) for spec in caches):
            raise EngineError(
                f"model_type={model_type}: an indexer selects the keys that a query "
                f"attends to ({name}={settings[name]}), and no attention of labkit skips the "
                "others; set engine=mlx_lm"
            )


def is_batchable(cache: Any) -> bool:
    """Return whether mlx_lm's BatchGenerator can batch requests with such a cache."""
    return hasattr(cache, "merge")


def make_prompt_cache(model: Any) -> Sequence[Any]:
    """Return the caches that mlx_lm would use for one sequence."""
    caches: Sequence[Any] = import_plain("cache").make_prompt_cache(model)
    return caches


def read_eos_token_ids(model_dir: Path) -> frozenset[int]:
    """Return ``eos_token_ids.read_eos_token_ids``; a mistake in a file is an ``EngineError``."""
    with config_errors():
        return frozenset(eos_token_ids.read_eos_token_ids(model_dir))
