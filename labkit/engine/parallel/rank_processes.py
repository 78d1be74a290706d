"""The ranks' processes: started together, asked together, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from labkit import config
from labkit.engine.engine_protocol import EngineError
from labkit.engine.parallel import mlx_ring
from labkit.engine.parallel.rank_messages import (
    BarrierArrival,
    BarrierRelease,
    RankCall,
    RankFailure,
    RankReply,
    RankSetup,
)
from labkit.machine import worker_environment

RANK_COMMAND = (sys.executable, "-m", "labkit.engine.parallel.rank_worker")
# Ranks do the same work at the same time. One that is so far behind another does nothing.
STRAGGLER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 1.0  # for a rank that was asked to end


class RankError(RuntimeError):
    """A rank has ended, stays behind or computes something else, in one line; none is left."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank as its engine's process sees it."""

    number: int
    child: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self.child.poll()
        how = f"exit status {code}" if code is None or code >= 0 else _signal_name(-code)
        return f"rank {self.number} (process {self.child.pid}) has ended: {how}"


class RankProcesses:
    """Processes that are told the same, and answer when all have done it.

    They are in the process group of the process that starts them, and end with it however it
    ends (``machine.watchdog``).

    Parameters
    ----------
    size
        How many.
    environment
        Variables besides the clean set that a worker starts from.
    budget
        Threads of all ranks together.
    command
        A rank's, to which its pipe and whom to watch are appended.
    straggler_s
        How long one may stay behind another (seconds).
    """

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str],
        budget: int,
        command: Sequence[str] = RANK_COMMAND,
        straggler_s: float = STRAGGLER_TIMEOUT_S,
    ) -> None:
        self.threads = max(1, budget // size)
        self._straggler_s = straggler_s
        self._ranks: list[RankProcess] = []
        self._open = contextlib.ExitStack()
        try:
            hostfile = self._open.enter_context(mlx_ring.reserved_hostfile(size))
            lifeline, hold = os.pipe()
            self._open.callback(os.close, hold)
            clean, _ = worker_environment.worker_environment(
                os.environ, threads=self.threads, cores=self.threads
            )
            clean |= {**environment, "MLX_HOSTFILE": str(hostfile)}
            try:
                for number in range(size):
                    mine = {**clean, "MLX_RANK": str(number)}
                    self._ranks.append(_start_rank(number, command, mine, lifeline))
            finally:
                os.close(lifeline)
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [rank.child.pid for rank in self._ranks]

    def set_up(self, options: config.Engine, model_dir: Path) -> list[RankReply]:
        """Have every rank build its engine; see ``ask``."""
        path = str(model_dir.absolute())
        return self._ask(
            [RankSetup(n, options, path, self.threads) for n in range(len(self._ranks))]
        )

    def ask(self, name: str, *arguments: Any) -> list[RankReply]:
        """Call a method of every rank's engine; return the answers, by rank.

        Raises
        ------
        EngineError
            The ranks have ended before.
        RankError
            A rank has ended, stays behind, or does something else than another.
        Exception
            One of ``messages.ERRORS``, which a rank's engine has raised; no rank is left.
        """
        if not self._ranks:
            raise EngineError("the ranks have ended; make the engine anew")
        return self._ask([RankCall(name, arguments)] * len(self._ranks))

    def _ask(self, messages: Sequence[RankSetup | RankCall]) -> list[RankReply]:
        try:
            self._tell(messages)
            while True:
                replies = self._replies()
                if all(isinstance(reply, RankReply) for reply in replies):
                    return replies
                _check_same_barrier(replies)
                self._tell([BarrierRelease()] * len(self._ranks))
        except BaseException:
            self.end()
            raise

    def _tell(self, messages: Sequence[Any]) -> None:
        for rank, message in zip(self._ranks, messages, strict=True):
            try:
                rank.pipe.send(message)
            except OSError:
                raise RankError(self._ended()) from None

    def _replies(self) -> list[Any]:
        """Wait for one message of every rank."""
        pipes = {rank.pipe: rank for rank in self._ranks}
        found: dict[int, Any] = {}
        deadline: float | None = None
        while pipes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(pipes), left)
            if not ready:
                late = ", ".join(f"rank {rank.number}" for rank in pipes.values())
                raise RankError(f"{late} stays behind the others for {self._straggler_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                found[rank.number] = self._reply(rank)
            if deadline is None:
                deadline = time.monotonic() + self._straggler_s
        return [found[rank.number] for rank in self._ranks]

    def _reply(self, rank: RankProcess) -> Any:
        try:
            reply = rank.pipe.recv()
        except (EOFError, OSError):
            raise RankError(self._ended()) from None
        if isinstance(reply, RankFailure):
            killed = [r.ending for r in self._ranks if (r.child.poll() or 0) < 0]
            raise RankError("; ".join(killed)) if killed else reply.error(rank.number)
        return reply

    def _ended(self) -> str:
        """Name the ranks that have ended; a pipe may close a moment before its process ends."""
        until = time.monotonic() + STOP_TIMEOUT_S
        while not (gone := [r for r in self._ranks if r.child.poll() is not None]):
            if time.monotonic() > until:
                return "a rank has closed its pipe"
            time.sleep(0.005)
        return "; ".join(rank.ending for rank in gone)

    def close(self) -> None:
        """Ask the ranks to end, and end those that do not."""
        with contextlib.suppress(RankError):
            self._tell([RankCall("close")] * len(self._ranks))
        until = time.monotonic() + STOP_TIMEOUT_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.child.wait(max(0.0, until - time.monotonic()))
        self.end()

    def end(self) -> None:
        """Kill the ranks that are left."""
        for rank in self._ranks:
            rank.child.kill()
        for rank in self._ranks:
            rank.child.wait()
            rank.pipe.close()
        self._ranks = []
        self._open.close()


def _start_rank(
    number: int, command: Sequence[str], environment: Mapping[str, str], lifeline: int
) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        facts = ["--pipe", theirs.fileno(), "--parent", os.getpid(), "--lifeline", lifeline]
        if threading.current_thread() is threading.main_thread():
            facts.append("--lasting")
        child = subprocess.Popen(
            [*command, *map(str, facts)],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            pass_fds=(theirs.fileno(), lifeline),
        )
    return RankProcess(number, child, Connection(ours.detach()))


def _check_same_barrier(replies: Sequence[Any]) -> None:
    """Check that all ranks wait at the same place."""
    places = [
        reply.at if isinstance(reply, BarrierArrival) else "nothing to compute" for reply in replies
    ]
    if len(set(places)) > 1:
        said = "; ".join(f"rank {rank}: {at[:16]}" for rank, at in enumerate(places))
        raise RankError(f"the ranks do not compute the same step ({said})")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
