"""Shard a model among ranks, and check beforehand that it can be sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import config
from labkit.cpu.precision.gguf_block_formats import is_gguf_only
from labkit.engine.engine_protocol import EngineError
from labkit.machine.exception_text import one_line

if TYPE_CHECKING:
    from labkit.engine.model.model_loader import LoadedModel
    from labkit.engine.parallel.mlx_ring import Ring

# Sizes in config.json that must be multiples of the number of ranks.
SHARDED_DIMENSIONS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
# Names of MLX's layer classes whose partial results the ranks sum.
ALL_REDUCED_LAYERS = ("ShardedToAllLinear", "QuantizedShardedToAllLinear")


def check(experiment: config.Experiment) -> None:
    """Raise ``ConfigError`` (one line) if config.json shows that a model cannot be sharded."""
    size = experiment.engine.parallel.size
    if size == 1 or experiment.engine.name != "paged" or experiment.model.shape is not None:
        return  # a configured shape was checked with the config
    from labkit.models import resolve

    dequantized = experiment.engine.weights is config.Weights.float32
    reason = sharding_error(resolve(experiment.model).path, size, dequantized=dequantized)
    config.require(reason is None, str(reason))


def sharding_error(model_dir: Path, size: int, *, dequantized: bool = False) -> str | None:
    """Return the reason that a model cannot be sharded among ``size`` ranks, as one line, or None.

    Also returns None if config.json cannot be read; loading the model reports the error.
    ``dequantized``: the matrices are float32 when they are sharded.
    """
    try:
        outer = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        settings = {**outer, **(outer.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    prefix = f"engine.parallel.size={size}: {model_dir.name}"
    for name in SHARDED_DIMENSIONS:
        value = settings.get(name)
        if isinstance(value, int) and value % size:
            return (
                f"{prefix}: {name}={value} is not a multiple of {size}; set another size or model"
            )
    if dequantized:
        return None
    quantization = settings.get("quantization") or {}
    types = _unsharded_types(quantization)
    if types:
        return (
            f"{prefix}: MLX cannot divide the GGUF types {', '.join(types)} of its layers; set "
            "engine.weights=float32 or engine.parallel.size=1, or take a Q8_0 or Q4_0 file"
        )
    group = quantization.get("group_size")
    inner = settings.get("intermediate_size")
    if group and isinstance(inner, int) and inner // size % group:
        return (
            f"{prefix}: a rank's share of intermediate_size={inner} is {inner // size}, not a "
            f"multiple of the quantisation group of {group}; set another size or model"
        )
    return None


def _unsharded_types(quantization: Mapping[str, Any]) -> list[str]:
    """Return the GGUF types of divided layers that only labkit's own layers have."""
    entries = (entry for path, entry in quantization.items() if ".layers." in f".{path}")
    modes = {str(entry.get("mode")) for entry in entries if isinstance(entry, dict)}
    return sorted(mode.upper() for mode in modes if is_gguf_only(mode))


def shard(loaded: LoadedModel, ring: Ring) -> LoadedModel:
    """Reduce a model in place to this rank's shard with mlx_lm, or raise ``EngineError``."""
    import mlx.core as mx

    prefix = f"engine.parallel.size={ring.size}: model_type={loaded.model_type}"
    model = loaded.model
    if not hasattr(model, "shard"):
        raise EngineError(
            f"{prefix}: mlx_lm cannot shard this architecture; set engine.parallel.size=1"
        )
    try:
        model.shard(ring.group)
        mx.eval(model.parameters())  # so that the unsharded matrices are freed
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise EngineError(
            f"{prefix}: mlx_lm cannot shard it: {one_line(error)}; set engine.parallel.size=1"
        ) from None
    return replace(loaded, num_all_reduces=sum(map(_is_all_reduced, model.modules())))


def _is_all_reduced(layer: Any) -> bool:
    """Return whether the ranks sum a layer's results. Experts have a ``sharding_group``."""
    return (
        type(layer).__name__ in ALL_REDUCED_LAYERS
        or getattr(layer, "sharding_group", None) is not None
    )
