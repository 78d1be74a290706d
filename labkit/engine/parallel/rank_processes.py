"""The ranks' processes, which are started, called and ended together."""

from __future__ import annotations

import contextlib
import math
import os
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

import psutil

from labkit import config
from labkit.engine.engine_protocol import EngineError
from labkit.engine.parallel import mlx_ring
from labkit.engine.parallel.rank_messages import BarrierArrival, RankCall, RankFailure, RankReply
from labkit.machine import worker_environment
from labkit.machine.processes.process_tree import signal_name

RANK_COMMAND = (sys.executable, "-m", "labkit.engine.parallel.rank_worker")
# Ranks do equal work at the same time: a rank that replies this much later than another is stuck.
# While no rank has replied, a rank that uses no CPU time for this long is stuck. A rank that
# computes or compiles uses some, however slowly, and so does a rank that waits for another one's
# partial sums, because MLX's ring polls its sockets.
STRAGGLER_TIMEOUT_S = 120.0
# CPU times are compared so many times in STRAGGLER_TIMEOUT_S. Checks are counted, not seconds,
# because the time in which this process itself was stopped must not count.
CPU_TIME_CHECKS = 10
STOP_TIMEOUT_S = 1.0  # a rank that has not ended by itself after this time is killed


class RankError(RuntimeError):
    """A rank has died, is stuck, or computes another step. All ranks have been killed."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A handle on one rank's process, in the process that started the rank."""

    number: int
    child: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, in seconds (NaN: it has ended)."""
        try:
            times = psutil.Process(self.child.pid).cpu_times()
        except psutil.Error:
            return math.nan
        return times.user + times.system

    @property
    def exit_description(self) -> str:
        """How the process ended, for example ``rank 1 (process 4711) has ended: SIGKILL``."""
        code = self.child.poll()
        how = f"exit status {code}" if code is None or code >= 0 else signal_name(-code)
        return f"rank {self.number} (process {self.child.pid}) has ended: {how}"


class RankProcesses:
    """The processes of all ranks. A call goes to every rank and returns when all have replied.

    The ranks belong to the process group of the process that starts them, and are killed when that
    process ends, however it ends (``machine.processes.parent_death``).

    ``size``: the number of ranks. ``environment``: variables to set in addition to the clean worker
    environment. ``thread_budget``: threads of all ranks together. ``command``: the command that
    starts a rank; the options for its pipe and its parent are appended. ``straggler_timeout_s``:
    seconds after the first rank's reply within which all other ranks must reply, and seconds before
    it within which every rank must use CPU time.
    """

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str],
        thread_budget: int,
        command: Sequence[str] = RANK_COMMAND,
        straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
    ) -> None:
        self.threads = max(1, thread_budget // size)
        self._straggler_timeout_s = straggler_timeout_s
        self._ranks: list[RankProcess] = []
        self._resources = contextlib.ExitStack()
        try:
            hostfile = self._resources.enter_context(mlx_ring.reserved_hostfile(size))
            lifeline, held_open = os.pipe()
            self._resources.callback(os.close, held_open)
            clean, _ = worker_environment.worker_environment(
                os.environ, threads=self.threads, cores=self.threads
            )
            clean |= {**environment, "MLX_HOSTFILE": str(hostfile)}
            try:
                for number in range(size):
                    rank_environment = {**clean, "MLX_RANK": str(number)}
                    self._ranks.append(_start_rank(number, command, rank_environment, lifeline))
            finally:
                os.close(lifeline)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.child.pid for rank in self._ranks]

    def set_up(self, options: config.Engine, model_dir: Path) -> list[RankReply]:
        """Have every rank build its engine. Raises the same exceptions as ``call``."""
        setup = options, model_dir.absolute(), self.threads
        return self._exchange([RankCall("set_up", (r.number, *setup)) for r in self._ranks])

    def call(self, name: str, *arguments: Any) -> list[RankReply]:
        """Call a method of every rank's engine and return the replies in rank order.

        All ranks are killed on any exception. Raises ``EngineError`` if the ranks have ended
        already. Raises ``RankError`` if a rank has died, is stuck, or computes a different step
        than the others. Raises ``Exception`` if one of ``FORWARDED_ERRORS`` that a rank's engine
        raised.
        """
        if not self._ranks:
            raise EngineError("the ranks have ended; create a new engine")
        return self._exchange([RankCall(name, arguments)] * len(self._ranks))

    def _exchange(self, messages: Sequence[RankCall]) -> list[RankReply]:
        try:
            self._send(messages)
            while True:
                replies = self._replies()
                if all(isinstance(reply, RankReply) for reply in replies):
                    return replies
                _check_same_barrier(replies)
                self._send([RankCall("release")] * len(self._ranks))
        except BaseException:
            self.kill()
            raise

    def _send(self, messages: Sequence[RankCall]) -> None:
        for rank, message in zip(self._ranks, messages, strict=True):
            try:
                rank.pipe.send(message)
            except OSError:
                raise RankError(self._describe_ended()) from None

    def _replies(self) -> list[Any]:
        pipes = {rank.pipe: rank for rank in self._ranks}
        replies: dict[int, Any] = {}
        self._wait_for_first(list(pipes))
        deadline = time.monotonic() + self._straggler_timeout_s
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(f"rank {rank.number}" for rank in pipes.values())
                raise RankError(
                    f"{late}: no reply {self._straggler_timeout_s:g} s after the others"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                replies[rank.number] = self._reply(rank)
        return [replies[rank.number] for rank in self._ranks]

    def _wait_for_first(self, pipes: list[Connection[Any, Any]]) -> None:
        """Wait until a rank has sent a message or has ended.

        Raises ``RankError`` if a rank uses no CPU time meanwhile: it is stuck, and the others wait
        for its partial sums.
        """
        last = [rank.cpu_s() for rank in self._ranks]
        idle_checks = [0] * len(last)
        while not wait(pipes, self._straggler_timeout_s / CPU_TIME_CHECKS):
            now = [rank.cpu_s() for rank in self._ranks]
            idle_checks = [
                count + 1 if before == after else 0
                for count, before, after in zip(idle_checks, last, now, strict=True)
            ]
            last = now
            if max(idle_checks) == CPU_TIME_CHECKS:
                stuck = (n for n, count in enumerate(idle_checks) if count == CPU_TIME_CHECKS)
                raise RankError(
                    f"{', '.join(f'rank {n}' for n in stuck)}: no reply, and no CPU time used in "
                    f"{self._straggler_timeout_s:g} s"
                )

    def _reply(self, rank: RankProcess) -> Any:
        try:
            reply = rank.pipe.recv()
        except (EOFError, OSError):
            raise RankError(self._describe_ended()) from None
        if isinstance(reply, RankFailure):
            killed = [r.exit_description for r in self._ranks if (r.child.poll() or 0) < 0]
            raise RankError("; ".join(killed)) if killed else reply.to_exception(rank.number)
        return reply

    def _describe_ended(self) -> str:
        """Return a line that names the ended ranks. A pipe may close before its process ends."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not (ended := [r for r in self._ranks if r.child.poll() is not None]):
            if time.monotonic() > deadline:
                return "a rank has closed its pipe"
            time.sleep(0.005)
        return "; ".join(rank.exit_description for rank in ended)

    def close(self) -> None:
        """Ask the ranks to end, and kill those that have not ended after ``STOP_TIMEOUT_S``."""
        with contextlib.suppress(RankError):
            self._send([RankCall("close")] * len(self._ranks))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.child.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill all ranks and release their resources. Further calls do nothing."""
        for rank in self._ranks:
            rank.child.kill()
        for rank in self._ranks:
            rank.child.wait()
            rank.pipe.close()
        self._ranks = []
        self._resources.close()


def _start_rank(
    number: int, command: Sequence[str], environment: Mapping[str, str], lifeline: int
) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        options = ["--pipe", theirs.fileno(), "--parent", os.getpid(), "--lifeline", lifeline]
        if threading.current_thread() is threading.main_thread():
            options.append("--started-by-main-thread")
        child = subprocess.Popen(
            [*command, *map(str, options)],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            pass_fds=(theirs.fileno(), lifeline),
        )
    return RankProcess(number, child, Connection(ours.detach()))


def _check_same_barrier(replies: Sequence[Any]) -> None:
    barriers = [
        reply.name if isinstance(reply, BarrierArrival) else "nothing to compute"
        for reply in replies
    ]
    if len(set(barriers)) > 1:
        listed = "; ".join(f"rank {rank}: {name[:16]}" for rank, name in enumerate(barriers))
        raise RankError(f"the ranks do not compute the same step ({listed})")
