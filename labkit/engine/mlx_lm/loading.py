"""A model directory through mlx_lm's own loader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.engine.base import EngineError
from labkit.engine.model_loader import end_of_text


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plain mlx_lm model in float32; prompts hold ids below ``vocab_size``."""

    model: Any
    vocab_size: int
    eos_token_ids: frozenset[int]


def load(model_dir: Path) -> Loaded:
    """Load a model; weights in half precision become float32, as in every other engine.

    Raises
    ------
    EngineError
        mlx_lm refuses the directory; its reason in one line.
    """
    from mlx_lm.utils import load_model

    try:
        model, settings = load_model(Path(model_dir))
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"engine=mlx_lm: {model_dir}: {reason}") from None
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    vocab_size = int(model(mx.array([[0]])).shape[-1])  # the shape alone: nothing is computed
    return Loaded(model, vocab_size, end_of_text(settings, model_dir))
