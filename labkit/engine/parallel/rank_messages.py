"""Messages between the engine and its ranks, pickled over one pipe per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.engine.engine_protocol import EngineError, InvalidLogitsError, KVBytes, StaleLaunchError
from labkit.machine.exception_text import one_line, one_line_with_type


@dataclass(frozen=True, slots=True)
class RankCall:
    """A message to a rank: the engine method to call, with its arguments.

    Some names call no method. The first message is ``set_up``, with the rank's number, the engine's
    options, the model's directory and the number of threads. ``close`` ends the rank,
    ``schedule_digest`` asks for the digest of its ``ScheduleCheck``, and ``release`` lets it
    continue after a barrier. The arguments of ``submit`` are the request's id and the pickled
    request, because a request that a rank cannot unpickle must not end the rank.
    """

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class BarrierArrival:
    """A message from a rank that waits at the barrier ``name``, as all ranks must."""

    name: str


@dataclass(frozen=True, slots=True)
class RankReply:
    """A message from a rank: a call's value, and the engine's state and running ids after it."""

    value: Any
    running: frozenset[str]
    kv: KVBytes
    computed_tokens: float


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's last message: the exception that ended the rank.

    ``kind`` is the name of the class in ``FORWARDED_ERRORS`` that the exception is an instance of,
    ``message`` the exception's message.
    """

    kind: str
    message: str

    @classmethod
    def from_exception(cls, error: Exception) -> RankFailure:
        """Return the failure of ``error``: a ``RuntimeError`` unless its class is forwarded."""
        message = one_line(error)
        kind = next((base.__name__ for base in type(error).__mro__ if base in FORWARDED_ERRORS), "")
        if kind != type(error).__name__:
            message = one_line_with_type(error)
        return cls(kind or "RuntimeError", message)

    def to_exception(self, rank: int) -> Exception:
        """Return the exception to raise in the run's process, with ``rank`` in its message."""
        kind = next(error for error in FORWARDED_ERRORS if error.__name__ == self.kind)
        return kind(f"rank {rank}: {self.message}")


def refusal(error: Exception) -> str:
    """Return why a request is refused whose pickling or unpickling raised ``error``."""
    return (
        f"the request cannot be sent to the ranks ({one_line_with_type(error)}); a constraint, "
        "such as a grammar, needs engine.parallel.size=1 unless it can be pickled"
    )


# Exceptions that callers of an engine distinguish, so their types must survive the pipe.
FORWARDED_ERRORS: tuple[type[Exception], ...] = (
    EngineError,
    InvalidLogitsError,
    StaleLaunchError,
    MemoryError,
    RuntimeError,
    ValueError,
)
