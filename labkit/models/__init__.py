"""Model directories: built from a seed, read from GGUF, or found on disk. No mlx here."""

from __future__ import annotations

from labkit.config import Model
from labkit.models.model_directory import ModelDir

__all__ = ["ModelDir", "resolve"]


def resolve(model: Model) -> ModelDir:
    """Return the directory of ``model``, built or converted into the cache on first use.

    Raises
    ------
    ConfigError
        ``model.path`` is nothing that mlx_lm can load, or the package with the model is not
        installed; one line says why.
    CacheError
        The cache folder cannot be written.
    """
    from labkit.models import model_directory, shipped_model

    if model.packaged is not None:
        return shipped_model.find_shipped_model(model.packaged, name=model.name)
    if model.shape is None:
        return model_directory.find_model(model.path or "")
    from labkit.models.synthetic_model import build

    path = build(model.shape, seed=model.seed, name=model.name)
    return model_directory.inspect(path, name=model.name, asked=f"model={model.name} ({path})")
