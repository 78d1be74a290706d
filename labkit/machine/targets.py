"""What kernels can run on here, known without importing MLX: Metal, or the emulator."""

from __future__ import annotations

import platform
import shutil
import sys

CPP = "g++"


def has_metal() -> bool:
    """Tell whether this is Apple silicon under macOS."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def compiler(name: str | None = None) -> str | None:
    """Return where the C++ compiler ``name`` (by default g++) is; None if it is not on PATH."""
    return shutil.which(name or CPP)


def missing_compiler(name: str | None = None) -> str:
    """Say in one line that the emulator of Metal kernels lacks its compiler, and what to do."""
    return (
        f"device=emulated: no {name or CPP} on PATH; install a C++17 compiler (g++ 12 or later) "
        "or set device=cpu"
    )
