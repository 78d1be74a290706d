"""Names of signals for messages."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Return a signal's name, as ``SIGKILL``, or ``signal 35`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
