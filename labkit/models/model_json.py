"""The JSON files of a model directory: reading and writing them, special tokens, the context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from labkit.config import ConfigError, require
from labkit.machine.exception_text import one_line
from labkit.models.safetensors_header import LFS_ADVICE, LFS_POINTER

# The keys of config.json that hold the length of the context. The last two are those of OLMo and
# OpenELM.
CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
    "max_sequence_length", "max_context_length",
)  # fmt: skip


def read_object(path: Path, where: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a file of a model directory.

    ``where``: what error messages begin with. None: the directory. Raises ``ConfigError`` if the
    file is missing, unreadable or not a JSON object. The message is one line.
    """
    where = where or str(path.parent)
    require(path.is_file(), f"{where}: the folder has no {path.name}")
    check_not_pointer(path, where)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {path.name} is not valid JSON ({one_line(error)})") from None
    require(isinstance(value, dict), f"{where}: {path.name} is not a JSON object")
    return dict(value)


def check_not_pointer(path: Path, where: str) -> None:
    """Raise ``ConfigError`` if Git LFS has not yet put the file in its place."""
    try:
        with path.open("rb") as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        raise ConfigError(f"{where}: {path.name}: {error.strerror or error}") from None
    require(not is_pointer, f"{where}: {path.name} {LFS_ADVICE}")


def decode_tagged_floats(value: Any) -> Any:
    """Return JSON data with ``{"__float__": "Infinity"}`` replaced by the number, at any depth.

    transformers 5 writes the floats of config.json that JSON does not have in this way.
    """
    if isinstance(value, dict):
        tag = value.get("__float__") if len(value) == 1 else None
        if tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: decode_tagged_floats(item) for key, item in value.items()}
    return [decode_tagged_floats(item) for item in value] if isinstance(value, list) else value


def read_optional(path: Path, where: str | None = None) -> dict[str, Any]:
    """Return ``read_object``, or an empty object if there is no such file."""
    return read_object(path, where) if path.exists() else {}


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file of a model directory."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a special token such as ``eos_token`` in tokenizer_config.json."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def max_context(config: Mapping[str, Any]) -> int | None:
    """Return the context in tokens of a model's config.json, or None if the file has none.

    YaRN extends the original context, to which many models set ``max_position_embeddings``.
    """
    config = with_text_config(config)
    lengths = (config.get(key) for key in CONTEXT_KEYS)
    context = next((int(length) for length in lengths if isinstance(length, int)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if context is None or not has_scaling(scaling, "yarn"):
        return context
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if not (isinstance(original, int) and isinstance(factor, int | float)):
        return context
    if not (original < 1 << 40 and abs(factor) < 1 << 20):  # also of NaN
        return context
    return max(context, int(original * factor))


def with_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the settings of ``text_config``, which take precedence."""
    nested = config.get("text_config")
    return {**config, **(nested if isinstance(nested, dict) else {})}


def has_scaling(scaling: Any, kind: str) -> TypeGuard[dict[str, Any]]:
    """Return whether a ``rope_scaling`` is of a kind such as ``yarn``."""
    return isinstance(scaling, dict) and kind in (scaling.get("rope_type"), scaling.get("type"))
