"""Best-effort reading of system facts: a fact that cannot be read is left out."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from struct import error as StructError
from typing import Any

TOOL_TIMEOUT_S = 2.0  # a tool that takes longer is treated as absent

Readers = Mapping[str, Callable[[], Any]]


def collect(readers: Readers) -> dict[str, Any]:
    """Call every reader; return the values by name, without those that failed or are None."""
    values = {}
    for name, reader in readers.items():
        try:
            value = reader()
        except (OSError, ValueError, LookupError, AttributeError, StructError):
            continue
        if value is not None:
            values[name] = value
    return values


def command_output(*command: str) -> str:
    """Run a tool of the operating system and return its standard output.

    Raises ``OSError`` if the tool is absent, fails or takes longer than ``TOOL_TIMEOUT_S``.
    """
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TOOL_TIMEOUT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None
    return result.stdout.decode(errors="replace")
