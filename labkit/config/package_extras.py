"""labkit's optional pip extras: whether their packages are installed, and how to install them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from labkit.config.option import require

DISTRIBUTION = "mlx-labkit"  # the name labkit is somebody else's there
# What ``mlx`` installs, beyond what a study of the CPU's kernels imports.
MLX_PACKAGES = ("mlx", "mlx_lm", "safetensors", "tokenizers")


def install_hint(extra: str) -> str:
    """Return the words that tell how an extra is installed."""
    return f"run: pip install '{DISTRIBUTION}[{extra}]'"


def require_packages(packages: Sequence[str], extra: str, key: str = "") -> None:
    """Raise ``ConfigError`` unless all packages are installed. ``key``: what asks for them."""
    missing = [package for package in packages if find_spec(package) is None]
    asked = f"{key}: " if key else ""
    require(not missing, f"{asked}not installed: {', '.join(missing)}; {install_hint(extra)}")
