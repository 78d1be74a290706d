"""The Metal sources: headers shared by the kernels, and one body per kernel.

MLX writes a kernel's signature; the body begins where a function's ``{`` would stand.
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
    """Return what stands before every kernel; it ends in a newline, as MLX needs it."""
    return "\n".join(source(name).rstrip("\n") for name in HEADERS) + "\n"
