"""Names of signals for messages."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Return a signal's name like ``SIGKILL``, or text like ``signal 35`` if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
