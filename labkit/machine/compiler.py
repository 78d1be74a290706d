"""Where the C++ compiler is that the emulator of Metal kernels needs."""

from __future__ import annotations

import shutil

NAME = "g++"


def path(name: str | None = None) -> str | None:
    """Return where ``name`` (by default g++) is; None if it is not on PATH."""
    return shutil.which(name or NAME)


def missing(name: str | None = None) -> str:
    """Say in one line what is missing and what to do."""
    return (
        f"device=emulated: no {name or NAME} on PATH; install a C++17 compiler (g++ 12 or later) "
        "or set device=cpu"
    )
