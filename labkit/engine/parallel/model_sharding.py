"""A model divided among ranks: whether it can be, and one rank's share of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import config
from labkit.engine.engine_protocol import EngineError

if TYPE_CHECKING:
    from labkit.engine.model_loader import LoadedModel
    from labkit.engine.parallel.mlx_ring import Ring

# What is divided by the number of ranks, as config.json calls it.
SHARDED_DIMENSIONS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
# Layers whose results the ranks add up.
ALL_REDUCED_LAYERS = ("ShardedToAllLinear", "QuantizedShardedToAllLinear")


def check(experiment: config.Experiment) -> None:
    """Refuse an arm whose model cannot be divided, as far as its config.json tells.

    Raises
    ------
    ConfigError
        One line that names what is not a multiple of the ranks.
    """
    size = experiment.engine.parallel.size
    if size == 1 or experiment.engine.name != "paged" or experiment.model.shape is not None:
        return  # a shape was checked with the rest of the config
    from labkit.models import resolve

    reason = sharding_error(resolve(experiment.model).path, size)
    config.require(reason is None, str(reason))


def sharding_error(model_dir: Path, size: int) -> str | None:
    """Say in one line why a model cannot be divided among ``size`` ranks.

    None: it can, or its config.json does not tell, and loading will.
    """
    try:
        outer = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        settings = {**outer, **(outer.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    where = f"engine.parallel.size={size}: {model_dir.name}"
    for name in SHARDED_DIMENSIONS:
        whole = settings.get(name)
        if isinstance(whole, int) and whole % size:
            return f"{where}: {name}={whole} is not a multiple of it; set another size or model"
    group = (settings.get("quantization") or {}).get("group_size")
    inner = settings.get("intermediate_size")
    if group and isinstance(inner, int) and inner // size % group:
        return (
            f"{where}: a rank's {inner // size} of intermediate_size={inner} are no whole groups "
            f"of {group} quantised weights; set another size or model"
        )
    return None


def shard(loaded: LoadedModel, ring: Ring) -> LoadedModel:
    """Leave of a model this rank's share, in place, by mlx_lm's own ``shard``.

    Raises
    ------
    EngineError
        The architecture cannot be divided, in one line.
    """
    import mlx.core as mx

    where = f"engine.parallel.size={ring.size}: model_type={loaded.model_type}"
    model = loaded.model
    if not hasattr(model, "shard"):
        raise EngineError(f"{where}: mlx_lm does not divide this architecture; set size=1")
    try:
        model.shard(ring.group)
        mx.eval(model.parameters())  # so that the whole matrices go
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"{where}: it cannot be divided: {reason}") from None
    return replace(loaded, sums=sum(map(_is_all_reduced, model.modules())))


def _is_all_reduced(layer: Any) -> bool:
    """Tell whether the ranks add up a layer's results; experts have their ranks as a group."""
    return (
        type(layer).__name__ in ALL_REDUCED_LAYERS
        or getattr(layer, "sharding_group", None) is not None
    )
