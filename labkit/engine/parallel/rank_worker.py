"""A rank's process: ``python -m labkit.engine.parallel.rank_worker``, started by the engine's.

It builds the engine as one process would, of its share of the model, and does what it is told
until its pipe ends. Ctrl-C is the starting process's to answer; a rank ignores it.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from labkit.engine.engine_protocol import EngineError, KVBytes
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.parallel.rank_messages import (
    BarrierArrival,
    BarrierRelease,
    EngineSnapshot,
    RankCall,
    RankFailure,
    RankReply,
    RankSetup,
)
from labkit.engine.parallel.schedule_check import ScheduleCheck
from labkit.machine import parent_death


class RankShutdown(Exception):
    """The engine's process has closed the pipe, or asked for the end."""


class RankWorker:
    """One rank: its pipe, and the engine on its share of the model."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._live: set[str] = set()
        self._agreement: ScheduleCheck | None = None

    def run(self) -> int:
        """Build the engine and serve; the exit status."""
        try:
            engine = self._build(self._receive())
            self._answer(engine, engine.notes)
            while True:
                call = self._receive()
                self._answer(engine, self._do(engine, call))
        except (RankShutdown, BrokenPipeError, ConnectionResetError):
            return 0
        except Exception as error:
            if not isinstance(error, EngineError):
                traceback.print_exc()
            self._pipe.send(RankFailure.by(error))
            return 1

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RankShutdown from None

    def _wait(self, at: str) -> None:
        """Say where this rank waits, and return when the others have come there too."""
        self._pipe.send(BarrierArrival(at))
        if not isinstance(self._receive(), BarrierRelease):
            raise RankShutdown

    def _build(self, setup: RankSetup) -> LLMEngine:
        """Settle what a process has one of, join the ring, build the engine."""
        from labkit.cpu import thread_pool
        from labkit.machine import openblas_for_mlx
        from labkit.machine.worker_environment import numba_without_scipy

        with numba_without_scipy():
            thread_pool.install()
        # Two pools that spin fight each other: numba's has the threads.
        openblas_for_mlx.activate(setup.options.blas.value, 1)
        self._use(setup.threads)
        from labkit.engine.engine_factory import create_rank
        from labkit.engine.parallel import mlx_ring

        self._wait("ready for the ring")
        joined = mlx_ring.join_ring(setup.rank, setup.options.parallel.size)
        self._agreement = ScheduleCheck(joined.size, self._wait)
        return create_rank(setup.options, Path(setup.model_dir), joined, self._agreement)

    def _use(self, threads: int) -> None:
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    def _do(self, engine: LLMEngine, call: RankCall) -> Any:
        if call.name == "close":
            raise RankShutdown
        if call.name == "schedule_digest":
            assert self._agreement is not None
            return self._agreement.digest
        value = getattr(engine, call.name)(*call.arguments)
        if call.name == "submit":
            self._live.add(call.arguments[0].request_id)
        elif call.name == "abort":
            self._live.discard(call.arguments[0])
        elif call.name == "step":
            self._live -= {event.request_id for event in value if event.finish_reason}
        return value

    def _answer(self, engine: LLMEngine, value: Any) -> None:
        running = frozenset(filter(engine.is_running, self._live))
        kv: KVBytes = engine.kv_bytes()
        self._pipe.send(RankReply(value, EngineSnapshot(running, kv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 where the rank failed."""
    parser = argparse.ArgumentParser(prog="python -m labkit.engine.parallel.rank_worker")
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--lasting", action="store_true")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    parent_death.watch_parent(options.parent, options.lifeline, lasting=options.lasting)
    return RankWorker(Connection(options.pipe)).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking the ring apart would wait for ranks that have ended.
    os._exit(status)
