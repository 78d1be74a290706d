"""The engine that others see: it hands every call to the ranks, and computes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit import config
from labkit.engine.engine_protocol import EngineError, KVBytes, TokenEvent
from labkit.engine.parallel.model_sharding import sharding_error
from labkit.engine.parallel.rank_messages import RankReply
from labkit.engine.parallel.rank_processes import (
    RANK_COMMAND,
    STRAGGLER_TIMEOUT_S,
    RankError,
    RankProcesses,
)
from labkit.engine.request import Request
from labkit.machine.worker_environment import core_count


def create(
    options: config.Engine,
    model_dir: Path,
    command: Sequence[str] = RANK_COMMAND,
    straggler_s: float = STRAGGLER_TIMEOUT_S,
) -> TensorParallelEngine:
    """Start ``engine.parallel.size`` ranks and have each build its engine.

    ``command``, ``straggler_s``: see ``RankProcesses``.

    Raises
    ------
    EngineError
        The model cannot be divided, or a rank refuses it; one line.
    RankError
        A rank has ended.
    """
    size = options.parallel.size
    reason = sharding_error(model_dir, size)
    if reason is not None:
        raise EngineError(reason)
    budget = options.threads or core_count()
    ranks = RankProcesses(size, options.mlx.environment(), budget, command, straggler_s)
    return TensorParallelEngine(options.name, ranks, ranks.set_up(options, model_dir))


class TensorParallelEngine:
    """``InferenceEngine`` over ranks, each of which has the whole engine and does every call.

    What rank 0 answers is what is returned; where the others answer another token, the step
    fails. An exception ends the ranks, and with them the engine.
    """

    def __init__(self, name: str, ranks: RankProcesses, built: Sequence[RankReply]) -> None:
        self.name = name
        self._ranks = ranks
        self._look = built[0].look
        self._live: set[str] = set()
        self._step_ms = 0.0
        threads = "1 thread" if ranks.threads == 1 else f"{ranks.threads} threads"
        self.notes: dict[str, Any] = {
            **built[0].value,
            "ranks": f"{len(built)} processes of {threads}, {', '.join(map(str, ranks.pids))}",
        }

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        try:
            answers = self._ranks.ask(name, *arguments)
        except BaseException:
            self._live.clear()
            raise
        self._look = answers[0].look
        return [answer.value for answer in answers]

    def submit(self, request: Request) -> None:
        """Queue a request; see ``InferenceEngine.submit``."""
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id}: this id is live already")
        self._ask("submit", request)
        self._live.add(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ids are ignored."""
        if request_id in self._live:
            self._ask("abort", request_id)
            self._live.discard(request_id)

    def has_work(self) -> bool:
        """Tell whether a request is live or a refusal is not yet reported."""
        return bool(self._live)

    def step(self) -> list[TokenEvent]:
        """Have the ranks run one batch; see ``InferenceEngine.step``.

        Raises
        ------
        RankError
            A rank has ended or the ranks do not agree; every request is lost.
        """
        start = time.perf_counter()
        events: list[TokenEvent]
        events, *others = self._ask("step")
        self._step_ms += (time.perf_counter() - start) * 1e3
        self._live -= {event.request_id for event in events if event.finish_reason}
        if any(_sampled_tokens(other) != _sampled_tokens(events) for other in others):
            self._end()
            raise RankError("the ranks sampled different tokens from the same step")
        return events

    def is_running(self, request_id: str) -> bool:
        """Tell whether a request has been admitted and has not ended."""
        return request_id in self._look.running

    def kv_bytes(self) -> KVBytes:
        """Say how much KV memory requests hold in all ranks, and how much of it is computed."""
        size, kv = len(self._ranks.pids), self._look.kv
        return KVBytes(reserved=size * kv.reserved, used=size * kv.used)

    def counters(self) -> dict[str, float]:
        """Return rank 0's counters; bytes are those of all ranks, the steps' time is as seen here.

        ``notes`` has each rank's digest of the schedule afterwards.
        """
        first, *others = self._ask("counters")
        values = dict(first)
        for name in filter(_is_summed_over_ranks, first):
            values[name] += sum(other.get(name, 0.0) for other in others)
        waited = values["step_ms"] - values["host_ms"]
        values |= {"step_ms": self._step_ms, "host_ms": self._step_ms - waited}
        digests = self._ask("schedule_digest")
        self.notes["schedule_digests"] = "; ".join(
            f"rank {rank}: {digest}" for rank, digest in enumerate(digests)
        )
        return values

    def reset_counters(self) -> None:
        """Start counting anew in every rank."""
        self._ask("reset_counters")
        self._step_ms = 0.0

    def clear_cache(self) -> None:
        """Forget the prefixes that no live request holds."""
        self._ask("clear_cache")

    def close(self) -> None:
        """End the ranks."""
        self._live.clear()
        self._ranks.close()

    def _end(self) -> None:
        self._live.clear()
        self._ranks.end()


def _sampled_tokens(events: Sequence[TokenEvent]) -> list[tuple[str, int, str | None]]:
    return [(event.request_id, event.token, event.finish_reason) for event in events]


def _is_summed_over_ranks(counter: str) -> bool:
    """Tell whether each rank counts its own share: bytes of weights and of KV memory."""
    return "bytes" in counter or counter.startswith("weights.")
