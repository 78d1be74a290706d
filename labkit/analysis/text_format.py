"""Text format: machines and lists of names as phrases, names as file stems, text for Markdown."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HTML_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def machine_words(environment: Mapping[str, Any]) -> list[str]:
    """Return a machine's CPU, cores, memory, system and accelerator, as far as they are known."""
    cores, memory = environment.get("cores"), environment.get("memory_bytes")
    words = (
        environment.get("cpu_model"),
        cores and f"{cores} cores",
        memory and f"{memory / 2**30:.0f} GiB",
        environment.get("os"),
        environment.get("accelerator"),
    )
    return [str(word) for word in words if word]


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Return names as a phrase: ``a``, ``a and b``, ``a, b and c``."""
    if len(names) < 3:
        return f" {last} ".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def markdown_text(text: str) -> str:
    """Return a text for Markdown; what looks like an HTML tag (``</s>``) would vanish on GitHub."""
    return HTML_TAG.sub(r"\\<", text)


def slug(text: str, longest: int = 80) -> str:
    """Turn a name into a file stem of at most ``longest`` characters.

    The stem has only ASCII letters, digits, dots, underscores and dashes. A longer name is cut and
    ends in a digest of the whole name, and so does one with other letters or signs, except for the
    × of labkit's own cases.
    """
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")
    if len(stem) > longest or re.search(r"[^\x00-\x7f×]", text):
        return _with_digest(stem, text, longest)
    return stem or "unnamed"


def distinct_slugs(names: Iterable[str]) -> dict[str, str]:
    """Return the stem of each name; if only signs distinguish names, later ones get a digest."""
    stems: dict[str, str] = {}
    for name in names:
        stem = slug(name)
        stems[name] = _with_digest(stem, name) if stem in stems.values() else stem
    return stems


def _with_digest(stem: str, text: str, longest: int = 80) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{stem[: longest - 9].strip('-.')}-{digest}".lstrip("-")
