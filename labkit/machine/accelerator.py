"""Whether this machine has a GPU that MLX computes on, known without importing MLX."""

from __future__ import annotations

import platform
import sys


def has_metal() -> bool:
    """Tell whether this is Apple silicon under macOS."""
    return sys.platform == "darwin" and platform.machine() == "arm64"
