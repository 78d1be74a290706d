"""A pool of worker processes for untrusted or unbounded tasks, which are killed past a limit.

Such tasks are chat templates and grammars. A process starts when it is first needed. It is killed
if a task exceeds a limit, or if the client whose task it does disconnects. The next task then
starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from labkit.server.types.api_error import ApiError

MAX_PROCESSES = 2
WAIT_S = 10.0  # for a free process, while all of them do other tasks
START_S = 60.0  # for a process to get ready
POLL_S = 0.01  # between checks of a task's limits
RETRY_AFTER_S = 5
MAX_ANSWER_BYTES = 1 << 27


class TaskFailed(Exception):
    """A process was killed because its task exceeded a limit, or it died by itself."""


class TooSlow(TaskFailed):
    """A task took longer than ``timeout_s``."""


class TooLarge(TaskFailed):
    """A task needed more memory than ``memory_bytes``."""


@dataclass(frozen=True)
class WorkerOptions:
    """What the processes run, and the limits of one task."""

    module: str  # the module that a process runs (see :mod:`labkit.server.killable_process_loop`)
    setup: Mapping[str, Any]  # what the module is told at its start
    # What it does, for a client that finds all processes busy: ``compiling other grammars``.
    work: str
    # timeout_s, memory_bytes: the longest time of a task (seconds), and the growth of the process's
    # resident memory.
    timeout_s: float
    memory_bytes: int


class WorkerPool:
    """Up to ``MAX_PROCESSES`` processes, each of which does one task at a time."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._free = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[TaskProcess] = []
        self._busy: set[TaskProcess] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[TaskProcess]:
        """Wait for a free process, at most ``WAIT_S`` seconds, and lend it.

        Leaving the context while a task runs, or by an exception of it, ends the process. Raises
        ``ApiError`` if all processes are busy (429), or the pool is closed (503).
        """
        self.check_open()
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise ApiError(
                429, f"the server is {self._options.work}", retry_after=RETRY_AFTER_S
            ) from None
        worker = self._idle.pop() if self._idle else TaskProcess(self._options)
        self._busy.add(worker)
        try:
            self.check_open()
            yield worker
        except Exception:  # possibly because ``close`` killed the process
            self.check_open()
            raise
        finally:
            self._free.release()
            self._busy.discard(worker)
            if worker.is_idle and not self._closed:
                self._idle.append(worker)
            else:
                worker.kill()

    def check_open(self) -> None:
        """Raise ``ApiError`` (503) if the pool is closed."""
        if self._closed:
            raise ApiError(503, "the server is stopping")

    async def start(self) -> None:
        """Start a process, so that the first task need not wait for it."""
        with contextlib.suppress(ApiError):  # the first task will say so
            async with self.worker() as worker:
                await worker.start()

    async def close(self) -> None:
        """Kill the processes. Whoever waits for them gets ``ApiError`` (503)."""
        self._closed = True
        processes, self._idle = [*self._idle, *self._busy], []
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


class TaskProcess:
    """A process that does one task at a time. ``is_idle``: it runs and has nothing to do."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self.is_idle = False

    async def answer(self, task: Any) -> Any:
        """Return the answer to a task; both are JSON-like. Starts the process unless it runs.

        Raises ``ApiError`` if the process does not start (500). Raises ``TaskFailed`` if the task
        exceeded a limit, or the process died, for which the task need not be the reason.
        """
        process = self._process
        if process is None or process.returncode is not None:
            process = await self.start()
        self.is_idle = False
        answering = asyncio.ensure_future(_exchange(process, task))
        try:
            answer = await self._within_limits(answering, process.pid)
        except EOFError:
            raise TaskFailed from None
        finally:
            answering.cancel()
        self.is_idle = True
        return answer

    async def _within_limits(self, answering: asyncio.Future[Any], pid: int) -> Any:
        """Wait for an answer. The process cannot watch its own memory while a call is running."""
        ends = time.monotonic() + self._options.timeout_s
        most_bytes = _resident_bytes(pid) + self._options.memory_bytes
        while not (await asyncio.wait({answering}, timeout=POLL_S))[0]:
            if _resident_bytes(pid) > most_bytes:
                raise TooLarge
            if time.monotonic() > ends:
                raise TooSlow
        return answering.result()

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process and wait until it is ready. Raises ``ApiError`` (500) if that fails."""
        setup = {
            **self._options.setup,
            "parent": os.getpid(),
            "started_by_main_thread": threading.current_thread() is threading.main_thread(),
        }
        # A session of its own protects the process from ctrl-C in the terminal. What it writes to
        # standard error may contain a client's text.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._options.module, json.dumps(setup),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True, limit=MAX_ANSWER_BYTES,
        )  # fmt: skip
        self._process = process
        if self._killed:
            process.kill()
        try:
            async with asyncio.timeout(START_S):
                await _read_answer(process)
        except (TimeoutError, EOFError):
            raise ApiError(500, f"{self._options.module} does not start") from None
        self.is_idle = True
        return process

    def kill(self) -> None:
        """Kill the process if it is running or being started."""
        self._killed, self.is_idle = True, False
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self) -> None:
        """Wait until the killed process has ended."""
        if self._process is not None:
            await self._process.wait()


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


async def _exchange(process: asyncio.subprocess.Process, task: Any) -> Any:
    """Send a task to a process and return the answer. Raises ``EOFError`` if the process ends."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(task).encode() + b"\n")
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    return await _read_answer(process)


async def _read_answer(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)
