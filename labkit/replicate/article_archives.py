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
    The path of one that is not there does not exist.

    Raises
    ------
    RecordError
        The article cannot be read, or has no such table.
    """
    try:
        text = article.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{article} is neither a study nor an article: {error}") from None
    names = [named or line for named, line in NAMED.findall(text)]
    for place in TABLES.finditer(text):
        names += studies_named(place["table"] or "")
    if not names:
        raise RecordError(f"{article}: no table of it names a study's archive")
    folder = article.resolve().parent
    paths = ([f / name for f in (folder, *folder.parents)] for name in names)
    return list(dict.fromkeys(next((p for p in own if p.exists()), own[0]) for own in paths))
