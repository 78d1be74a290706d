"""A trained model that a Python package ships as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from labkit.config import ConfigError, PackagedFile, require
from labkit.machine import file_digest
from labkit.models import model_directory
from labkit.models.gguf.gguf_to_mlx_lm import converted_path
from labkit.models.model_directory import ModelDir


def find_shipped_model(packaged: PackagedFile, *, name: str) -> ModelDir:
    """Convert a package's model into the cache on its first use, and return the directory.

    The package is located, but not imported. Its file is verified before the conversion. Once the
    model is in the cache, the package is no longer needed. Raises ``ConfigError`` if the package is
    not installed, or its file's SHA-256 is not ``packaged.sha256``. The message is one line.
    """
    option = f"model={name}"
    model_dir = converted_path(digest=packaged.sha256, name=name)
    if model_dir.is_dir():
        return model_directory.inspect(model_dir, name=name, option=option)
    path = _installed_file(packaged, option)
    digest = file_digest.sha256(path)
    require(
        digest == packaged.sha256,
        f"{option}: {path} is another version of the file (SHA-256 {digest}, expected "
        f"{packaged.sha256}); install {packaged.install}",
    )
    return model_directory.from_gguf(path, name=name, digest=packaged.sha256, option=option)


def _installed_file(packaged: PackagedFile, option: str) -> Path:
    spec = importlib.util.find_spec(packaged.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / packaged.file
        if path.is_file():
            return path
    raise ConfigError(
        f"{option}: its package is not installed; run: pip install {packaged.install}"
    )
