"""Asking a tool of the operating system."""

from __future__ import annotations

import subprocess

TIMEOUT_S = 2.0  # a tool that takes longer tells nothing


def output(*command: str) -> str:
    """Run a tool and give what it prints.

    Raises
    ------
    OSError
        It is absent, fails or takes too long: as for any other reader.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None
    return done.stdout.decode(errors="replace")
