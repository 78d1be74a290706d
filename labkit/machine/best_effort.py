"""Best-effort reading of what a system may not tell."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from struct import error as StructError
from typing import Any

TOOL_TIMEOUT_S = 2.0  # a tool that takes longer tells nothing

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


def command_output(*command: str) -> str:
    """Run a tool of the operating system and return what it prints.

    Raises
    ------
    OSError
        It is absent, fails or takes too long: as for any other reader.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TOOL_TIMEOUT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None
    return done.stdout.decode(errors="replace")
