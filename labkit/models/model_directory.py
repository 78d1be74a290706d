"""A model directory on disk: check it, name it, read what planning needs. No weights read."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from labkit.config import ConfigError, require

MAX_WHOLE_HASH_BYTES = 1 << 20  # files up to this size (bytes) are hashed whole
GGUF_HEAD_BYTES = 1 << 24  # so much of a GGUF file is hashed whole: it holds the metadata (bytes)
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # larger ones at this many places, so many bytes each
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelDir:
    """A directory that ``mlx_lm.load`` can load.

    ``digest`` names the content (hex): the small files whole, the weights by samples.
    ``context``: tokens that the model was made for; None where it does not say.
    """

    path: Path
    digest: str
    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context: int | None = None


def find_model(asked: str) -> ModelDir:
    """Find ``model.path``: a directory, a GGUF file, or a hub id in the Hugging Face cache.

    Nothing is downloaded; a GGUF file is converted into the cache the first time.

    Raises
    ------
    ConfigError
        There is no such model, or it lacks something; one line says what.
    """
    label = f"model.path={asked}"
    path = Path(asked).expanduser()
    if path.is_dir():
        return inspect(path.absolute(), name=path.absolute().name, asked=label)
    if path.is_file():
        return from_gguf(path.absolute(), name=path.stem, digest=_gguf_digest(path), asked=label)
    require(bool(HUB_ID.fullmatch(asked)), f"{label}: no such directory")
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(asked, "config.json")
    require(
        isinstance(config, str),
        f"{label}: no such directory, and no model of that name in the Hugging Face cache "
        f"(hf download {asked})",
    )
    return inspect(Path(str(config)).parent, name=asked, asked=label)


def from_gguf(path: Path, *, name: str, digest: str, asked: str) -> ModelDir:
    """Return the directory that a GGUF file is converted to; ``digest`` names its content."""
    from labkit.models.gguf import GGUFError
    from labkit.models.gguf.gguf_converter import convert

    try:
        folder = convert(path, digest=digest, name=name)
    except GGUFError as error:
        raise ConfigError(f"{asked}: {error}") from None
    return inspect(folder, name=name, asked=asked)


def inspect(path: Path, *, name: str, asked: str) -> ModelDir:
    """Check the directory ``path`` and read its facts.

    Parameters
    ----------
    path
        An existing directory.
    name
        What reports call the model.
    asked
        The option that led here; it opens every error message.
    """
    config = _read_json(path / "config.json", asked)
    require("model_type" in config, f"{asked}: config.json has no model_type")
    weights = sorted(path.glob("model*.safetensors"))
    require(bool(weights), f"{asked}: no model*.safetensors in it")
    require((path / "tokenizer.json").is_file(), f"{asked}: no tokenizer.json in it")
    text_config = {**config, **config.get("text_config", {})}
    return ModelDir(
        path=path,
        digest=_directory_digest(path, weights),
        name=name,
        vocab_size=_vocab_size(path, text_config, asked),
        eos_token_ids=_eos_token_ids(path, text_config, asked),
        context=_max_context(text_config),
    )


def _read_json(path: Path, asked: str) -> dict[str, Any]:
    require(path.is_file(), f"{asked}: no {path.name} in it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{asked}: {path.name} is not JSON ({error})") from None
    require(isinstance(value, dict), f"{asked}: {path.name} is not a JSON object")
    return dict(value)


def _vocab_size(path: Path, config: dict[str, Any], asked: str) -> int:
    if isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    from labkit.models import tokenizer

    return tokenizer.load(path).vocab_size


def _max_context(config: dict[str, Any]) -> int | None:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


def _eos_token_ids(path: Path, config: dict[str, Any], asked: str) -> tuple[int, ...]:
    """As mlx_lm: generation_config.json, else config.json, else the tokenizer's token."""
    stop = config.get("eos_token_id")
    if (path / "generation_config.json").is_file():
        stop = _read_json(path / "generation_config.json", asked).get("eos_token_id") or stop
    if stop is None and (path / "tokenizer_config.json").is_file():
        token = _read_json(path / "tokenizer_config.json", asked).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            from labkit.models import tokenizer

            stop = tokenizer.load(path).token_id(token)
    if stop is None:
        return ()
    return tuple(stop) if isinstance(stop, list) else (int(stop),)


def _directory_digest(path: Path, weights: list[Path]) -> str:
    small = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    )
    digest = hashlib.sha256()
    for file in [*(path / name for name in small if (path / name).is_file()), *weights]:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= MAX_WHOLE_HASH_BYTES:
                digest.update(stream.read())
            else:
                _hash_samples(stream, size, digest)
    return digest.hexdigest()[:32]


def _gguf_digest(path: Path) -> str:
    """Name a file's content (hex): its beginning whole, the rest by samples."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\0".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(GGUF_HEAD_BYTES))
        if size > GGUF_HEAD_BYTES:
            _hash_samples(stream, size, digest)
    return digest.hexdigest()


def _hash_samples(stream: BinaryIO, size: int, digest: hashlib._Hash) -> None:
    for index in range(NUM_SAMPLES):
        stream.seek((size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
        digest.update(stream.read(SAMPLE_BYTES))
