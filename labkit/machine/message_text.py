"""Parts of messages: an exception as one line, and a number with its noun."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line, or its class name where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def one_line_with_type(error: BaseException) -> str:
    """Return an exception's class and message in one line, for example ``ValueError: too long``."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def count_text(n: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is 1: ``1 block``, ``4 blocks``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
