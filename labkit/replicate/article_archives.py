"""The archives that an article's tables name."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.records import ARCHIVE_SUFFIX, RecordError

NAMED = (
    re.compile(r"\{\{\s*(?:table|settings)\(\s*\"(?P<study>[^\"\n]+)\""),
    re.compile(r"labkit\.replicate (?P<study>\S+\.zip)"),
)
REPEAT = "python -m labkit.replicate {study}"


def table_archives(article: Path) -> list[Path]:
    """Return the studies of an article's tables, each once, in their order.

    A study is looked up in the article's folder and in each folder above it, as placeholders are.

    Raises
    ------
    RecordError
        The article cannot be read, has no such table, or a study is not there.
    """
    try:
        text = article.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{article} is neither a study nor an article: {error}") from None
    places = sorted((m.start(), m["study"]) for pattern in NAMED for m in pattern.finditer(text))
    names = list(dict.fromkeys(name for _, name in places))
    if not names:
        raise RecordError(f"{article}: no table of it names a study's archive")
    return list(dict.fromkeys(_found(article, name) for name in names))


def _found(article: Path, name: str) -> Path:
    folder = article.resolve().parent
    for place in (folder, *folder.parents):
        path = place / name
        if path.is_dir() or (path.is_file() and path.suffix == ARCHIVE_SUFFIX):
            return path.resolve()
    raise RecordError(f"{article}: {name} is not in the article's folder or above it")
