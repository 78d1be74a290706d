"""``engine=mlx_lm``: mlx_lm's own BatchGenerator behind labkit's engine protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from labkit import config
from labkit.engine.engine_protocol import InferenceEngine
from labkit.engine.model import compute_dtype

if TYPE_CHECKING:
    from labkit.engine.runner.shared_models import SharedModels


def create(options: config.Engine, model_dir: Path, models: SharedModels) -> InferenceEngine:
    """Load a model with mlx_lm's own loader and create an engine around a ``BatchGenerator``.

    Raises ``EngineError`` if mlx_lm cannot load the model. The message is one line with mlx_lm's
    reason.
    """
    from labkit.engine.mlx_lm.batch_generator import MlxLmEngine

    scheduler = options.scheduler
    model = models.load_mlx_lm(
        model_dir, compute_dtype.cast_target(options), compute_dtype.matrix_storage(options)
    )
    return MlxLmEngine(model, scheduler.max_num_seqs, scheduler.chunk)
