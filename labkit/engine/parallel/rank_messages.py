"""What the engine and its ranks tell each other, pickled over a pipe of each rank's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit import config
from labkit.engine.engine_protocol import EngineError, InvalidLogitsError, KVBytes, StaleLaunchError


@dataclass(frozen=True, slots=True)
class RankSetup:
    """To a rank, first of all: which it is, and the engine to build with so many threads."""

    rank: int
    options: config.Engine
    model_dir: str
    threads: int


@dataclass(frozen=True, slots=True)
class RankCall:
    """To a rank: what to do next; ``close`` ends it."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class BarrierRelease:
    """To a rank: all ranks have come as far as this one."""


@dataclass(frozen=True, slots=True)
class BarrierArrival:
    """From a rank: it waits for the others. ``at``: where, the same in all of them."""

    at: str


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine between two calls: the requests that run, and its KV memory."""

    running: frozenset[str]
    kv: KVBytes


@dataclass(frozen=True, slots=True)
class RankReply:
    """From a rank: what a call returned, and the engine after it."""

    value: Any
    look: EngineSnapshot


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's last message: an exception, and the one of ``FORWARDED_ERRORS`` to raise for it."""

    kind: str
    message: str

    @classmethod
    def by(cls, error: Exception) -> RankFailure:
        """Return what is told of an exception."""
        text = " ".join(str(error).split())
        kind = next((base.__name__ for base in type(error).__mro__ if base in FORWARDED_ERRORS), "")
        if kind != type(error).__name__:
            text = f"{type(error).__name__}: {text}"
        return cls(kind or "RuntimeError", text)

    def error(self, rank: int) -> Exception:
        """Return the exception to raise, which names the rank."""
        kind = next(error for error in FORWARDED_ERRORS if error.__name__ == self.kind)
        return kind(f"rank {rank}: {self.message}")


# What engines raise that somebody tells apart.
FORWARDED_ERRORS: tuple[type[Exception], ...] = (
    EngineError,
    InvalidLogitsError,
    StaleLaunchError,
    MemoryError,
    RuntimeError,
    ValueError,
)
