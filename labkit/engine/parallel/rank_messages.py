"""Messages between the engine and its ranks, pickled over one pipe per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit import config
from labkit.engine.engine_protocol import EngineError, InvalidLogitsError, KVBytes, StaleLaunchError
from labkit.machine.exception_text import one_line, one_line_with_type


@dataclass(frozen=True, slots=True)
class RankSetup:
    """First message to a rank: its number, and the engine to build with ``threads`` threads."""

    rank: int
    options: config.Engine
    model_dir: str
    threads: int


@dataclass(frozen=True, slots=True)
class RankCall:
    """To a rank: the engine method to call next; ``close`` ends the rank."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class BarrierRelease:
    """To a rank: all ranks have reached the barrier; go on."""


@dataclass(frozen=True, slots=True)
class BarrierArrival:
    """From a rank: it waits at the barrier ``name``, which must be the same in all ranks."""

    name: str


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine's state between two calls: the running requests and the KV memory."""

    running: frozenset[str]
    kv: KVBytes


@dataclass(frozen=True, slots=True)
class RankReply:
    """From a rank: what a call returned, and the engine's state after it."""

    value: Any
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's last message: an exception, as one of ``FORWARDED_ERRORS`` and a message."""

    kind: str
    message: str

    @classmethod
    def from_exception(cls, error: Exception) -> RankFailure:
        """Return the message for an exception."""
        message = one_line(error)
        kind = next((base.__name__ for base in type(error).__mro__ if base in FORWARDED_ERRORS), "")
        if kind != type(error).__name__:
            message = one_line_with_type(error)
        return cls(kind or "RuntimeError", message)

    def to_exception(self, rank: int) -> Exception:
        """Return the exception to raise in the engine's process; its message names the rank."""
        kind = next(error for error in FORWARDED_ERRORS if error.__name__ == self.kind)
        return kind(f"rank {rank}: {self.message}")


# Exceptions of engines that callers tell apart.
FORWARDED_ERRORS: tuple[type[Exception], ...] = (
    EngineError,
    InvalidLogitsError,
    StaleLaunchError,
    MemoryError,
    RuntimeError,
    ValueError,
)
