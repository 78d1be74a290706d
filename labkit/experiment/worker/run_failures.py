"""Failures of runs: the outcome for each exception in a worker process.

An exception class of labkit names its outcome in its class attribute ``outcome``, one of
:data:`labkit.records.OUTCOMES`. Every other exception is judged by its type and message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from labkit.machine.exception_text import one_line
from labkit.records import OUTCOMES

# Messages of MLX, C++ and the operating system when no memory is left.
OUT_OF_MEMORY_MESSAGES = ("Unable to allocate", "bad_alloc", "Cannot allocate memory")


@dataclass(frozen=True)
class RunFailure:
    """The outcome of a failed run, and one line of detail."""

    outcome: str
    detail: str
    log: str | None = None  # that shows it, a path in the cell's folder

    def to_line(self) -> str:
        """Return the failure as a line of JSON, with which the log of a preparation ends."""
        return json.dumps({"outcome": self.outcome, "detail": self.detail})

    @classmethod
    def from_line(cls, line: str) -> RunFailure | None:
        """Return the failure in a log's line, or None if it is another line."""
        try:
            failure = cls(**json.loads(line))
        except (ValueError, TypeError):
            return None
        return failure if failure.outcome in OUTCOMES else None


def failure_of(error: Exception, stage: str) -> RunFailure:
    """Return the outcome and the detail for an exception raised in ``stage``.

    A ``ValueError`` while loading means that the arm cannot run as configured: ``refused``.
    """
    name, message = type(error).__name__, one_line(error)
    if isinstance(error, MemoryError) or any(m in str(error) for m in OUT_OF_MEMORY_MESSAGES):
        return RunFailure("oom", f"{stage}: out of memory: {message}")
    if isinstance(error, ValueError) and stage == "load":
        return RunFailure("refused", message)
    outcome = getattr(type(error), "outcome", None)
    if isinstance(outcome, str) and outcome in OUTCOMES:
        return RunFailure(outcome, message)
    return RunFailure("crashed", f"{stage}: {name}: {message}")
