"""A trained model that a Python package ships as a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from labkit.config import ConfigError, PackagedFile, require
from labkit.models import model_directory
from labkit.models.gguf.gguf_converter import converted_path
from labkit.models.model_directory import ModelDir


def find_shipped_model(packaged: PackagedFile, *, name: str) -> ModelDir:
    """Return the directory that the package's file is converted to, once, in the cache.

    The package is found, not imported. Its file is checked when it is converted; afterwards
    the cache is enough.

    Raises
    ------
    ConfigError
        The package is not installed, or its file is another one; one line says so.
    """
    asked = f"model={name}"
    folder = converted_path(digest=packaged.sha256, name=name)
    if folder.is_dir():
        return model_directory.inspect(folder, name=name, asked=asked)
    path = _installed_file(packaged, asked)
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    require(
        found == packaged.sha256,
        f"{asked}: {path} is not the file that is known (SHA-256 {found}, not {packaged.sha256})",
    )
    return model_directory.from_gguf(path, name=name, digest=packaged.sha256, asked=asked)


def _installed_file(packaged: PackagedFile, asked: str) -> Path:
    spec = importlib.util.find_spec(packaged.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / packaged.file
        if path.is_file():
            return path
    raise ConfigError(
        f"{asked}: the package that holds it is not installed: pip install {packaged.install}"
    )
