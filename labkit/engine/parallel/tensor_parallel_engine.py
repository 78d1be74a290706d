"""``TensorParallelEngine``: an engine that forwards every call to the ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit import config
from labkit.config import count_text
from labkit.engine.engine_protocol import EngineError, KVBytes, TokenEvent
from labkit.engine.parallel.model_sharding import sharding_error
from labkit.engine.parallel.rank_messages import RankReply, refusal
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
    straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
) -> TensorParallelEngine:
    """Start ``engine.parallel.size`` ranks that each build an engine, and return their front end.

    ``command`` and ``straggler_timeout_s`` are passed to ``RankProcesses``. Raises ``EngineError``
    if the model cannot be sharded, or a rank refuses the model. The message is one line. Raises
    ``RankError`` if a rank has died or is stuck.
    """
    size = options.parallel.size
    dequantized = options.weights is config.Weights.float32
    reason = sharding_error(model_dir, size, dequantized=dequantized)
    if reason is not None:
        raise EngineError(reason)
    budget = options.threads or core_count()
    ranks = RankProcesses(size, options.mlx.environment(), budget, command, straggler_timeout_s)
    return TensorParallelEngine(options.name, ranks, ranks.set_up(options, model_dir))


class TensorParallelEngine:
    """An ``InferenceEngine`` over ranks, each of which runs a complete engine.

    Every call is executed by all ranks, and rank 0's result is returned. A step fails if another
    rank sampled different tokens. After an exception all ranks have been killed, and the engine
    cannot be used again.
    """

    def __init__(self, name: str, ranks: RankProcesses, setup_replies: Sequence[RankReply]) -> None:
        self.name = name
        self._ranks = ranks
        self._last = setup_replies[0]
        self._live: set[str] = set()
        self._step_ms = 0.0
        threads = count_text(ranks.threads, "thread")
        pids = ", ".join(map(str, ranks.pids))
        self.notes: dict[str, Any] = {
            **setup_replies[0].value,
            "ranks": f"{len(setup_replies)} processes of {threads}, {pids}",
        }

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        try:
            replies = self._ranks.call(name, *arguments)
        except BaseException:
            self._live.clear()
            raise
        self._last = replies[0]
        return [reply.value for reply in replies]

    def submit(self, request: Request) -> None:
        if request.request_id in self._live:
            raise EngineError(f"request {request.request_id}: this id is already in use")
        try:
            pickled = pickle.dumps(request)
        except Exception as error:  # a constraint may be a user's class, or have a compiled grammar
            self._call("refuse", request.request_id, refusal(error))
        else:
            self._call("submit", request.request_id, pickled)
        self._live.add(request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._call("abort", request_id)
            self._live.discard(request_id)

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[TokenEvent]:
        """Have the ranks run one step; see ``InferenceEngine.step``.

        Raises ``RankError`` if a rank has died or is stuck, or the ranks scheduled different steps
        or sampled different tokens. Every request is lost.
        """
        start = time.perf_counter()
        events: list[TokenEvent]
        events, *others = self._call("step")
        self._step_ms += (time.perf_counter() - start) * 1e3
        self._live -= {event.request_id for event in events if event.finish_reason}
        if any(_sampled_tokens(other) != _sampled_tokens(events) for other in others):
            self._live.clear()
            self._ranks.kill()
            raise RankError("the ranks sampled different tokens from the same step")
        return events

    def is_running(self, request_id: str) -> bool:
        return request_id in self._last.running

    def kv_bytes(self) -> KVBytes:
        size, kv = len(self._ranks.pids), self._last.kv
        total = None if kv.total is None else size * kv.total
        return KVBytes(size * kv.reserved, size * kv.used, total)

    def computed_tokens(self) -> float:
        return self._last.computed_tokens

    def max_request_tokens(self) -> int:
        tokens: int = self._call("max_request_tokens")[0]
        return tokens

    def counters(self) -> dict[str, float]:
        """Return rank 0's counters, with bytes summed over all ranks.

        ``step_ms`` and ``host_ms`` are measured in this process. The call also sets
        ``notes["schedule_digests"]`` to each rank's digest.
        """
        first, *others = self._call("counters")
        values = dict(first)
        for name in filter(_is_summed_over_ranks, first):
            values[name] += sum(other.get(name, 0.0) for other in others)
        device_ms = values["step_ms"] - values["host_ms"]
        values |= {"step_ms": self._step_ms, "host_ms": self._step_ms - device_ms}
        digests = self._call("schedule_digest")
        self.notes["schedule_digests"] = "; ".join(
            f"rank {rank}: {digest}" for rank, digest in enumerate(digests)
        )
        return values

    def reset_counters(self) -> None:
        self._call("reset_counters")
        self._step_ms = 0.0

    def clear_cache(self) -> None:
        self._call("clear_cache")

    def close(self) -> None:
        self._live.clear()
        self._ranks.close()


def _sampled_tokens(events: Sequence[TokenEvent]) -> list[tuple[str, int, str | None]]:
    return [(event.request_id, event.token, event.finish_reason) for event in events]


def _is_summed_over_ranks(counter: str) -> bool:
    return "bytes" in counter or counter.startswith(("weights.", "activations."))
