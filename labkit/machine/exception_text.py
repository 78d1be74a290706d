"""Exceptions as one line of text, for messages and logs."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line, or its class name where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def one_line_with_type(error: BaseException) -> str:
    """Return an exception's class and message in one line, for example ``ValueError: too long``."""
    return " ".join(f"{type(error).__name__}: {error}".split())
