"""The Metal sources: headers shared by the kernels, and one body per kernel.

MLX generates a kernel's signature; a body file holds what stands between the braces.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

HEADERS = ("common", "resolve")


@cache
def source(name: str) -> str:
    """Return the text of ``NAME.metal``."""
    return (files(__package__) / f"{name}.metal").read_text(encoding="utf-8")


@cache
def header() -> str:
    """Return the source that precedes every kernel; it ends in a newline, which MLX needs."""
    return "\n".join(source(name).rstrip("\n") for name in HEADERS) + "\n"
