"""The GPU that MLX computes on, found without importing MLX.

The process that plans a study asks for it, and must not import MLX.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from labkit.machine.facts import macos, nvidia

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")


def mlx_gpu() -> str | None:
    """Return the GPU that MLX uses by default: ``metal``, ``cuda`` or None (it uses the CPU)."""
    if macos.has_metal():
        return "metal"
    return "cuda" if has_cuda() else None


def has_cuda(driver: Path = nvidia.DRIVER_FILE) -> bool:
    """Return whether MLX's CUDA build and an NVIDIA driver are installed."""
    return driver.exists() and any(map(_is_installed, CUDA_PACKAGES))


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
