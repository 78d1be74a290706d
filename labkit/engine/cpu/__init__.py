"""The CPU path: mlx_lm models on NumPy arrays, their leaves as numba kernels.

Importing this package imports neither MLX nor numba; the names below load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.engine.cpu.swap import SwapReport, swap_leaves

__all__ = ["SwapReport", "swap_leaves"]

_HOME = {
    "SwapReport": "swap",
    "swap_leaves": "swap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
