"""The Metal sources: headers shared by the kernels, and one body per kernel.

MLX generates a kernel's signature. The file of a body holds only the code between the braces.
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
    """Return the source that precedes every kernel. It ends in a newline, which MLX requires."""
    return "\n".join(source(name).rstrip("\n") for name in HEADERS) + "\n"
