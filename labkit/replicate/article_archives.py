"""The archives that an article's tables name."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.analysis.pages.article import TABLES, studies_named
from labkit.records import RecordError

NAMED = re.compile(r"\{\{\s*(?:table|settings)\(\s*\"([^\"\n]+)\"|labkit\.replicate ([^\s`]+\.zip)")


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
    names = dict.fromkeys(named or line for named, line in NAMED.findall(text))
    tables = (place["table"] or "" for place in TABLES.finditer(text))
    names |= dict.fromkeys(name for table in tables for name in studies_named(table))
    if not names:
        raise RecordError(f"{article}: no table of it names a study's archive")
    folder = article.resolve().parent
    found: dict[Path, None] = {}
    for name in names:
        path = next((f / name for f in (folder, *folder.parents) if (f / name).exists()), None)
        if path is None:
            raise RecordError(f"{article}: {name} is not in the article's folder or above it")
        found[path.resolve()] = None
    return list(found)
