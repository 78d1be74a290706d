"""A model directory through mlx_lm's own loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.engine.base import EngineError
from labkit.engine.model_loader import end_of_text


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plain mlx_lm model in float32; prompts hold ids below ``vocab_size``.

    ``slot_bytes``: KV bytes of one token over all layers, by the layers' sliding window.
    """

    model: Any
    vocab_size: int
    eos_token_ids: frozenset[int]
    slot_bytes: Mapping[int | None, int]


def load(model_dir: Path) -> Loaded:
    """Load a model; weights in half precision become float32, as in every other engine.

    Raises
    ------
    EngineError
        mlx_lm refuses the directory; its reason in one line.
    """
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    try:
        model, settings = load_model(Path(model_dir))
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"engine=mlx_lm: {model_dir}: {reason}") from None
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    caches = make_prompt_cache(model)
    vocab_size = int(model(mx.array([[0]]), cache=caches).shape[-1])  # shapes: nothing is computed
    return Loaded(model, vocab_size, end_of_text(settings, model_dir), slot_bytes(caches))


def slot_bytes(caches: Sequence[Any]) -> dict[int | None, int]:
    """Sum a token's bytes over the layers' filled caches, by sliding window."""
    total: dict[int | None, int] = {}
    for cache in caches:
        if getattr(cache, "keys", None) is not None:
            window = getattr(cache, "max_size", None)
            size = sum(array.nbytes // array.shape[2] for array in (cache.keys, cache.values))
            total[window] = total.get(window, 0) + size
    return total
