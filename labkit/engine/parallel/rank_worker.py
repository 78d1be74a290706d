"""A rank's process: ``python -m labkit.engine.parallel.rank_worker``.

The process builds an engine around its shard of the model and executes the calls that arrive over
its pipe until the pipe closes. It ignores SIGINT, which the process that started it handles.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from labkit import config
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.parallel.rank_messages import (
    BarrierArrival,
    RankCall,
    RankFailure,
    RankReply,
    refusal,
)
from labkit.engine.scheduler.scheduler_output import SchedulerOutput
from labkit.engine.step_loop import NoScheduleCheck
from labkit.engine.user_classes import UserClassError
from labkit.machine.processes import parent_death


class RankShutdown(Exception):
    """The run's process has closed the pipe or sent ``close``, so the rank must end."""


class ScheduleCheck(NoScheduleCheck):
    """Compares this rank's schedule digest with the other ranks' before each step.

    The ranks sum partial results in every layer. Ranks that scheduled different steps would sum
    unrelated numbers, or wait for each other for ever. So no rank computes a step before all ranks
    have the same ``digest`` (32 hex digits) of this step and of all steps before it. For every
    chunk it covers the request, the token range, the preemptions, the request's number of tokens
    and its last token, which depends on everything sampled before.

    ``wait_at`` sends a digest and returns once all ranks have sent the same digest. The counter
    ``ranks.agreed`` counts compared steps.
    """

    def __init__(self, ranks: int, wait_at: Callable[[str], None]) -> None:
        self.ranks = ranks
        self.digest = ""
        self._wait_at = wait_at

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        chunks = [
            (
                chunk.state.request_id,
                chunk.start,
                chunk.num_tokens,
                chunk.preemption_count,
                chunk.state.num_tokens,
                chunk.state.token_ids[-1],
            )
            for chunk in scheduled.chunks
        ]
        text = repr((self.digest, chunks)).encode()
        self.digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._wait_at(self.digest)
        if scheduled:
            counters.add("ranks.agreed")


class RankWorker:
    """A worker that executes the calls that arrive over ``pipe`` on one rank's engine."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._live: set[str] = set()
        self._schedule_check: ScheduleCheck | None = None

    def run(self) -> int:
        """Build the engine and execute calls until the pipe closes; return the exit status."""
        try:
            engine = self._build(*self._receive().arguments)
            self._reply(engine, engine.notes)
            while True:
                call = self._receive()
                self._reply(engine, self._execute(engine, call))
        except (RankShutdown, BrokenPipeError, ConnectionResetError):
            return 0
        except Exception as error:
            if not isinstance(error, EngineError | UserClassError):  # one line says it all
                traceback.print_exc()
            self._pipe.send(RankFailure.from_exception(error))
            return 1

    def _receive(self) -> RankCall:
        try:
            call: RankCall = self._pipe.recv()
        except EOFError:
            raise RankShutdown from None
        return call

    def _wait_at(self, barrier: str) -> None:
        self._pipe.send(BarrierArrival(barrier))
        if self._receive().name != "release":
            raise RankShutdown

    def _build(self, rank: int, options: config.Engine, model_dir: Path, threads: int) -> LLMEngine:
        """Set up the process (thread pool, BLAS), join the ring and build the engine."""
        from labkit.cpu.runtime import thread_pool
        from labkit.machine import openblas_for_mlx
        from labkit.machine.worker_environment import numba_without_scipy

        with numba_without_scipy():
            thread_pool.install()
        # One BLAS thread: numba's pool has the threads, and two spinning pools would compete.
        openblas_for_mlx.activate(options.blas.value, 1)
        import numba

        from labkit.engine.engine_factory import create_rank
        from labkit.engine.parallel import mlx_ring

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        self._wait_at("ready for the ring")
        ring = mlx_ring.join_ring(rank, options.parallel.size)
        self._schedule_check = ScheduleCheck(ring.size, self._wait_at)
        return create_rank(options, model_dir, ring, self._schedule_check)

    def _execute(self, engine: LLMEngine, call: RankCall) -> Any:
        if call.name == "close":
            raise RankShutdown
        if call.name == "schedule_digest":
            assert self._schedule_check is not None
            return self._schedule_check.digest
        if call.name == "submit":
            return self._submit(engine, *call.arguments)
        value = getattr(engine, call.name)(*call.arguments)
        if call.name == "abort":
            self._live.discard(call.arguments[0])
        elif call.name == "step":
            self._live -= {event.request_id for event in value if event.finish_reason}
        return value

    def _submit(self, engine: LLMEngine, request_id: str, pickled: bytes) -> None:
        try:
            request = pickle.loads(pickled)
        except Exception as error:  # for example, a class of the other process's __main__
            engine.refuse(request_id, refusal(error))
        else:
            engine.submit(request)
            self._live.add(request_id)

    def _reply(self, engine: LLMEngine, value: Any) -> None:
        running = frozenset(filter(engine.is_running, self._live))
        self._pipe.send(RankReply(value, running, engine.kv_bytes(), engine.computed_tokens()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if the rank failed."""
    parser = argparse.ArgumentParser(prog="python -m labkit.engine.parallel.rank_worker")
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--started-by-main-thread", action="store_true")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    parent_death.watch_parent(
        options.parent, options.lifeline, started_by_main_thread=options.started_by_main_thread
    )
    return RankWorker(Connection(options.pipe)).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without cleanup: closing the ring would wait for ranks that have died.
    os._exit(status)
