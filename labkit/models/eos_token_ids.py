"""The ids of the tokens that end a request, from the files of a model directory."""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, require
from labkit.machine.file_digest import FileState, file_state
from labkit.models.model_json import read_object, read_optional, special_token, with_text_config


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
