"""The JSON files of a model directory, among others the tokens that end a request, the context."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from labkit.config import ConfigError, require
from labkit.machine.exception_text import one_line
from labkit.machine.file_digest import FileState, file_state
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


def read_eos_token_ids(model_dir: Path, where: str | None = None) -> tuple[int, ...]:
    """Return the ids that end a request, in ascending order.

    As in mlx_lm, they are the ids of generation_config.json or, if it has none, of config.json, and
    in any case the tokenizer's EOS token, which ends the turn of a chat model. Raises
    ``ConfigError`` if a file is not a JSON object, or an ``eos_token_id`` is neither an id nor a
    list of ids.
    """
    config = read_object(model_dir / "config.json", where)
    generation = read_optional(model_dir / "generation_config.json", where)
    sources = {
        "generation_config.json": generation,
        "config.json": config,
        "text_config of config.json": with_text_config(config),
    }
    ids: set[int] = set()
    for name, source in sources.items():
        ids = ids or _token_ids(source.get("eos_token_id"), f"{where or model_dir}: {name}")
    return tuple(sorted(ids | read_tokenizer_eos(model_dir, where)))


def _token_ids(value: Any, where: str) -> set[int]:
    """Return the ids in ``eos_token_id``. A negative one stands for none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        is_id = isinstance(token, int) and not isinstance(token, bool)
        require(is_id, f"{where}: eos_token_id is {value!r}; must be a token id or a list of ids")
    return {token for token in ids if token >= 0}


def read_tokenizer_eos(model_dir: Path, where: str | None) -> Set[int]:
    """Return the tokenizer's EOS token, if any, from JSON: building the tokenizer would be slow."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    configs = (read_optional(model_dir / name, where) for name in names)
    eos = next((token for config in configs if (token := special_token(config, "eos_token"))), None)
    path = model_dir / "tokenizer.json"
    if eos is None or not path.exists():
        return frozenset()
    return _ids_in_tokenizer(path, eos, where, file_state(path))


@lru_cache(maxsize=16)  # every arm of a study asks for the same few megabytes
def _ids_in_tokenizer(path: Path, eos: str, where: str | None, state: FileState) -> frozenset[int]:
    """Return the id of the token ``eos`` in tokenizer.json; ``state`` tells a changed file."""
    tokenizer = read_object(path, where)
    try:
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
        vocab = tokenizer["model"].get("vocab")
        token_id = added.get(eos, vocab.get(eos) if isinstance(vocab, dict) else None)
        return frozenset() if token_id is None else frozenset({int(token_id)})
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        raise ConfigError(f"{where or path.parent}: tokenizer.json is not a tokenizer") from None
