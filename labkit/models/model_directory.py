"""Find and check a model directory, and read its sizes without loading weights."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, PackagedFile, require
from labkit.config.package_extras import require_packages
from labkit.machine import cache_entries, file_digest
from labkit.models import model_json, safetensors_header
from labkit.models.eos_token_ids import read_eos_token_ids

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelDir:
    """A directory that ``mlx_lm.load`` can load.

    ``digest``: a hex digest of the configuration, the tokenizer and the weights.
    ``max_context``: the context in tokens (``model_json.max_context``).
    """

    path: Path
    digest: str
    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context: int | None = None


def find_model(model_path: str) -> ModelDir:
    """Return the model at ``model.path``: a directory, a GGUF file, or a Hugging Face id.

    Nothing is downloaded: an id must be in the Hugging Face cache. A GGUF file is converted into
    labkit's cache on first use. Raises ``ConfigError`` if there is no such model, or a file is
    missing. The message is one line. Raises ``CacheError`` if the cache folder cannot be written.
    """
    option = f"model.path={model_path}"
    path = Path(model_path).expanduser()
    if path.is_dir():
        return inspect(path.absolute(), name=path.absolute().name, option=option)
    if path.is_file():
        digest = _file_digest(path, option)
        return from_gguf(path.absolute(), name=path.stem, digest=digest, option=option)
    is_gguf = path.suffix.lower() == ".gguf"
    require(not is_gguf, f"{option}: no such file")
    require(bool(HUB_ID.fullmatch(model_path)), f"{option}: no such directory or GGUF file")
    require_packages(("huggingface_hub",), "mlx", option)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model_path, "config.json")
    require(
        isinstance(config, str),
        f"{option}: no such directory, and no such model in the Hugging Face cache (run: "
        f"hf download {model_path})",
    )
    return inspect(Path(str(config)).parent, name=model_path, option=option)


def from_gguf(path: Path, *, name: str, digest: str, option: str) -> ModelDir:
    """Convert a GGUF file on its first use, and return the directory.

    ``digest``: the file's hex digest, part of the directory's name. The other parameters are those
    of ``inspect``.
    """
    require_packages(("tokenizers",), "mlx", option)
    from labkit.models.gguf import GGUFError
    from labkit.models.gguf.gguf_to_mlx_lm import convert

    try:
        model_dir = convert(path, digest=digest, name=name)
    except GGUFError as error:
        raise ConfigError(f"{option}: {error}") from None
    return inspect(model_dir, name=name, option=f"{option} ({model_dir})")


def inspect(path: Path, *, name: str, option: str) -> ModelDir:
    """Check a model directory and read its digest and sizes.

    ``path``: an existing directory. ``name``: the model's name in reports. ``option``: the option
    that named the directory, like ``model.path=...``. Error messages begin with it. Raises
    ``ConfigError`` if a file is missing or invalid.
    """
    config = model_json.read_object(path / "config.json", option)
    require("model_type" in config, f"{option}: config.json has no model_type")
    weights = find_weights(path, option)
    require((path / "tokenizer.json").is_file(), f"{option}: the folder has no tokenizer.json")
    text_config = model_json.with_text_config(config)
    return ModelDir(
        path=path,
        digest=_directory_digest(path, weights, option),
        name=name,
        vocab_size=_vocab_size(path, text_config, option),
        eos_token_ids=read_eos_token_ids(path, option),
        max_context=model_json.max_context(config),
    )


def find_weights(path: Path, where: str) -> list[Path]:
    """Return the files with a model's weights, in order. ``where``: the beginning of messages.

    Raises ``ConfigError`` if there are none, or one is not whole.
    """
    files = sorted(path.glob("model*.safetensors"))
    require(bool(files), f"{where}: the folder has no model*.safetensors")
    for file in files:
        try:
            safetensors_header.read_header(file)
        except OSError as error:
            raise ConfigError(f"{where}: {file.name}: {error.strerror or error}") from None
        except ValueError as error:
            raise ConfigError(f"{where}: {file.name} {error}") from None
    return files


def _vocab_size(path: Path, config: dict[str, Any], option: str) -> int:
    if isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    require_packages(("tokenizers",), "mlx", option)
    from labkit.models import tokenizer

    return tokenizer.load(path).vocab_size


def _directory_digest(path: Path, weights: list[Path], option: str) -> str:
    small = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    )
    digest = hashlib.sha256()
    for file in [*(path / name for name in small if (path / name).is_file()), *weights]:
        digest.update(f"{file.name}\0{_file_digest(file, option)}\0".encode())
    return digest.hexdigest()[:32]


def _file_digest(path: Path, option: str) -> str:
    try:
        return file_digest.sha256(path)
    except OSError as error:
        raise ConfigError(f"{option}: {path.name}: {error.strerror or error}") from None


def from_package(packaged: PackagedFile, *, name: str) -> ModelDir:
    """Convert a package's model into the cache on its first use, and return the directory.

    The package is located, but not imported. Its file is verified before the conversion. Once the
    model is in the cache, the package is no longer needed. Raises ``ConfigError`` if the package is
    not installed, or its file's SHA-256 is not ``packaged.sha256``. The message is one line.
    """
    option = f"model={name}"
    require_packages(("tokenizers",), "mlx", option)
    from labkit.models.gguf.gguf_to_mlx_lm import converted_path

    model_dir = converted_path(digest=packaged.sha256, name=name)
    if cache_entries.has_directory(model_dir):
        return inspect(model_dir, name=name, option=f"{option} ({model_dir})")
    path = _installed_file(packaged, option)
    digest = file_digest.sha256(path)
    require(
        digest == packaged.sha256,
        f"{option}: {path} is another version of the file (SHA-256 {digest}, expected "
        f"{packaged.sha256}); install {packaged.install}",
    )
    return from_gguf(path, name=name, digest=packaged.sha256, option=option)


def _installed_file(packaged: PackagedFile, option: str) -> Path:
    spec = importlib.util.find_spec(packaged.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / packaged.file
        if path.is_file():
            return path
    raise ConfigError(
        f"{option}: its package is not installed; run: pip install {packaged.install}"
    )
