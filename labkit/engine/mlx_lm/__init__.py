"""``engine=mlx_lm``: the real mlx_lm BatchGenerator behind labkit's engine protocol."""

from __future__ import annotations

from pathlib import Path

from labkit import config
from labkit.engine.base import InferenceEngine


def create(options: config.Engine, model_dir: Path) -> InferenceEngine:
    """Load a model as mlx_lm does and give it to a BatchGenerator of its own.

    Raises
    ------
    EngineError
        mlx_lm cannot load the model; one line with its reason.
    """
    from labkit.engine.mlx_lm.engine import MlxLmEngine
    from labkit.engine.mlx_lm.loading import load

    scheduler = options.scheduler
    return MlxLmEngine(load(model_dir), scheduler.max_num_seqs, scheduler.chunk)
