"""Best-effort reading of what a system may not tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import error as StructError
from typing import Any

Readers = Mapping[str, Callable[[], Any]]


def collect(readers: Readers) -> dict[str, Any]:
    """Read each field; one that this system does not tell is left out."""
    found = {}
    for name, reader in readers.items():
        try:
            value = reader()
        except (OSError, ValueError, LookupError, AttributeError, StructError):
            continue
        if value is not None:
            found[name] = value
    return found
