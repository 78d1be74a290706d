"""Loads an mlx_lm model class and its weights, without mlx_lm's heavy package import.

``import mlx_lm`` costs about 800 ms, most of it transformers; a model module alone costs
40, so only those are imported (``light_package``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit.engine import dtype
from labkit.engine.base import EngineError
from labkit.engine.layer_cache import Handle

# config.json's ``model_type`` where mlx_lm's module has another name.
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
# Caches that hold one key and one value per token, which a paged pool can hold too.
PLAIN_CACHES = ("KVCache", "RotatingKVCache")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, what its layers cache, and what its config says.

    ``windows``: per cached layer the sliding window in tokens, or None. ``matrices``: what
    loading did to them.
    """

    model: Any
    model_type: str
    windows: tuple[int | None, ...]
    eos_token_ids: frozenset[int]
    matrices: dtype.Matrices = dtype.Matrices.cast


@contextmanager
def light_package() -> Iterator[None]:
    """Make ``mlx_lm.models.*`` importable without running ``mlx_lm/__init__.py``.

    While it lasts an empty package that knows only where mlx_lm's files lie stands in for
    mlx_lm. It is taken away again, so that a later ``import mlx_lm`` is the real one and
    finds the model modules already loaded.
    """
    if "mlx_lm" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise EngineError("mlx_lm is not installed: pip install mlx-lm")
    package = ModuleType("mlx_lm")
    package.__spec__ = spec
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mlx_lm"] = package
    try:
        yield
    finally:
        if sys.modules.get("mlx_lm") is package:
            del sys.modules["mlx_lm"]


def import_model_module(name: str) -> ModuleType:
    """Import ``mlx_lm.models.<name>`` without the rest of mlx_lm."""
    with light_package():
        return importlib.import_module(f"mlx_lm.models.{name}")


def install_attention_hook() -> None:
    """Replace mlx_lm's attention by one that hands a ``Handle`` to its own engine.

    The replacement keeps no state: anything but a handle goes to mlx_lm's function, so
    plain mlx_lm and any number of engines live in one process. Installing twice is the
    same as once.
    """
    base = import_model_module("base")
    original = base.scaled_dot_product_attention
    if hasattr(original, "labkit_original"):
        return

    def scaled_dot_product_attention(
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> Any:
        if isinstance(keys, Handle):
            return keys.attend(queries, scale, mask, sinks)
        return original(queries, keys, values, cache, scale, mask, sinks=sinks)

    scaled_dot_product_attention.labkit_original = original  # type: ignore[attr-defined]
    # Model modules that were imported before bound the function by name.
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and (
            getattr(module, "scaled_dot_product_attention", None) is original
        ):
            module.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[attr-defined]


def load(
    model_dir: Path,
    layers: int | None = None,
    kind: str | None = "float32",
    matrices: dtype.Matrices = dtype.Matrices.cast,
) -> LoadedModel:
    """Build the model of a directory: config.json and model*.safetensors.

    ``layers``: only so many of its first layers, then its last norm and its output; None: all.
    ``kind``: what floating point weights are cast to, in MLX's words; None: nothing.
    ``matrices``: what becomes of those of linear layers and embeddings.

    Raises
    ------
    EngineError
        The directory is not a model, or its architecture or quantisation is not supported.
    """
    settings = _read_config(model_dir)
    if layers is not None:
        settings = _first_layers(settings, layers, model_dir)
    model_type = str(settings["model_type"])
    install_attention_hook()
    model = _build(_module(model_type), settings, model_dir)
    _load_weights(model, model_dir, settings.get("quantization"), layers)
    dtype.cast(model, kind, matrices)
    windows = _windows(model, model_type)
    return LoadedModel(model, model_type, windows, end_of_text(settings, model_dir), matrices)


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    if not path.is_file():
        raise EngineError(f"{model_dir}: no config.json, not a model directory")
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise EngineError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise EngineError(f"{path}: no model_type")
    _check_quantisation(settings, path)
    return settings


def _check_quantisation(settings: dict[str, Any], path: Path) -> None:
    """Refuse quantised weights that are not mlx_lm's own affine kind."""
    text = settings.get("text_config") or {}
    own = settings.get("quantization")
    foreign = settings.get("quantization_config") or text.get("quantization_config")
    if not own and (foreign or text.get("quantization")):
        raise EngineError(f"{path}: quantised, but not by mlx_lm; convert it with mlx_lm.convert")
    if own and own.get("mode", "affine") != "affine":
        raise EngineError(f"{path}: quantisation mode {own['mode']}; only affine is supported")


def _module(model_type: str) -> ModuleType:
    name = MODULE_OF_TYPE.get(model_type, model_type)
    try:
        return import_model_module(name)
    except ModuleNotFoundError as error:
        if error.name != f"mlx_lm.models.{name}":
            raise
        raise EngineError(f"model_type={model_type}: mlx_lm has no such architecture") from None
    except SystemExit:  # what mlx_lm's olmo does where hf_olmo is missing
        raise EngineError(f"model_type={model_type}: mlx_lm lacks a package for it") from None


def _build(module: ModuleType, settings: dict[str, Any], model_dir: Path) -> Any:
    try:
        return module.Model(module.ModelArgs.from_dict(settings))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"{model_dir / 'config.json'}: not a whole model ({reason})") from None


def _first_layers(settings: dict[str, Any], layers: int, model_dir: Path) -> dict[str, Any]:
    have = settings.get("num_hidden_layers")
    if not isinstance(have, int) or layers > have:
        raise EngineError(
            f"{model_dir / 'config.json'}: num_hidden_layers is {have}, {layers} are asked"
        )
    return {**settings, "num_hidden_layers": layers}


def _load_weights(
    model: Any, model_dir: Path, quantization: dict[str, Any] | None, layers: int | None
) -> None:
    import mlx.core as mx

    files = sorted(model_dir.glob("model*.safetensors"))
    if not files:
        raise EngineError(f"{model_dir}: no model*.safetensors")
    weights: dict[str, Any] = {}
    for file in files:
        loaded: Any = mx.load(str(file))
        weights.update(loaded)
    if layers is not None:
        weights = {name: value for name, value in weights.items() if _layer(name) < layers}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if quantization:
        _quantise(model, weights, quantization)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise EngineError(f"{model_dir}: {str(error).splitlines()[0]}") from None
    model.eval()


def _layer(name: str) -> int:
    """Return the layer that a weight belongs to; -1: to none."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _quantise(model: Any, weights: dict[str, Any], quantization: dict[str, Any]) -> None:
    """Give the layers whose weights are quantised their quantised class."""
    import mlx.nn as nn

    def options(path: str, layer: Any) -> Any:
        if path in quantization:
            return quantization[path]
        return hasattr(layer, "to_quantized") and f"{path}.scales" in weights

    nn.quantize(model, quantization["group_size"], quantization["bits"], class_predicate=options)


def _windows(model: Any, model_type: str) -> tuple[int | None, ...]:
    """Read each cached layer's window from the cache that the model itself would use."""
    windows: list[int | None] = []
    for cache in plain_caches(model):
        kind = type(cache).__name__
        if kind not in PLAIN_CACHES:
            raise EngineError(
                f"model_type={model_type}: its layers cache {kind}, not one key and one value "
                "per token; engine=paged cannot hold that"
            )
        if getattr(cache, "keep", 0):
            raise EngineError(
                f"model_type={model_type}: its windows keep {cache.keep} first tokens"
            )
        windows.append(int(cache.max_size) if kind == "RotatingKVCache" else None)
    return tuple(windows)


def plain_caches(model: Any) -> Sequence[Any]:
    """Return the caches that mlx_lm itself would use for one sequence."""
    caches: Sequence[Any] = import_model_module("cache").make_prompt_cache(model)
    return caches


def end_of_text(settings: dict[str, Any], model_dir: Path) -> frozenset[int]:
    """Return the end-of-text ids; generation_config.json wins over config.json."""
    generation = model_dir / "generation_config.json"
    sources = [settings, settings.get("text_config") or {}]
    if generation.is_file():
        sources.insert(0, json.loads(generation.read_text()))
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
