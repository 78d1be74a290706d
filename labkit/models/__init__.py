"""Model directories: built from a seed, converted from GGUF, or found on disk.

The package does not import MLX.
"""

from __future__ import annotations

from labkit.config import Model
from labkit.models.model_directory import ModelDir

__all__ = ["ModelDir", "resolve"]


def resolve(model: Model) -> ModelDir:
    """Return the directory of a configured model.

    A synthetic model is built into the cache on first use, and a GGUF file is converted. Raises
    ``ConfigError`` if ``model.path`` is not a model that mlx_lm can load, or the package that ships
    the model is not installed. The message is one line. Raises ``CacheError`` if the cache folder
    cannot be written.
    """
    from labkit.models import model_directory

    if model.packaged is not None:
        return model_directory.from_package(model.packaged, name=model.name)
    if model.shape is None:
        return model_directory.find_model(model.path or "")
    from labkit.models.synthetic.synthetic_model import build

    path = build(model.shape, seed=model.seed, name=model.name)
    return model_directory.inspect(path, name=model.name, option=f"model={model.name} ({path})")
