"""The processes that try grammars before the server compiles them, and the cache of their results.

A process starts when it is first needed. It is killed if a grammar exceeds a limit, or if the
client whose grammar it tries disconnects. The next grammar then starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from labkit.server.api_error import ApiError
from labkit.server.grammar_compiler import GrammarError, GrammarSource
from labkit.server.grammar_trial_worker import OUT_OF_MEMORY

MAX_PROCESSES = 2
MAX_CACHED_RESULTS = 1024  # of 0.5 kB each at most
WAIT_S = 10.0  # for a free process, while all of them try other grammars
START_S = 60.0  # for a process to import llguidance and read the tokenizer
RETRY_AFTER_S = 5


@dataclass(frozen=True)
class TrialOptions:
    """The model's vocabulary for the processes, and the limits of one grammar.

    ``timeout_s`` (seconds) and ``memory_bytes`` limit the compilation of a grammar.
    """

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]
    timeout_s: float
    memory_bytes: int


class GrammarProcesses:
    """Finds out whether a grammar can be enforced within the limits of time and memory."""

    def __init__(self, options: TrialOptions) -> None:
        self._options = options
        self._free = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[GrammarProcess] = []
        self._busy: set[GrammarProcess] = set()
        self._results: OrderedDict[bytes, str | None] = OrderedDict()
        self._closed = False

    async def check(self, source: GrammarSource) -> None:
        """Check that a grammar can be enforced. Cancelling this call ends the trial.

        Raises
        ------
        GrammarError
            The grammar cannot be enforced.
        ApiError
            All processes are busy with other grammars (429), or the server is stopping (503).
        """
        self._check_open()
        key = hashlib.sha256(f"{source.syntax} {source.text}".encode()).digest()
        if key not in self._results:
            async with self._process() as process:
                if key not in self._results:  # another request may have tried the same grammar
                    self._store(key, await self._try(process, source))
        self._results.move_to_end(key)
        reason = self._results[key]
        if reason is not None:
            raise GrammarError(reason)

    async def _try(self, process: GrammarProcess, source: GrammarSource) -> str | None:
        self._check_open()
        try:
            return await process.try_grammar(source)
        except (ApiError, GrammarError):  # possibly because ``close`` killed the process
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ApiError(503, "the server is stopping")

    def _store(self, key: bytes, reason: str | None) -> None:
        self._results[key] = reason
        if len(self._results) > MAX_CACHED_RESULTS:
            self._results.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[GrammarProcess]:
        """Wait for a free process, at most ``WAIT_S`` seconds, and yield it."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise ApiError(
                429, "the server is compiling other grammars", retry_after=RETRY_AFTER_S
            ) from None
        process = self._idle.pop() if self._idle else GrammarProcess(self._options)
        self._busy.add(process)
        try:
            yield process
        finally:
            self._free.release()
            self._busy.discard(process)
            if process.is_idle and not self._closed:
                self._idle.append(process)
            else:
                process.kill()

    async def close(self) -> None:
        """Kill the processes. Calls of ``check`` that wait for them raise ``ApiError`` (503)."""
        self._closed = True
        processes, self._idle = [*self._idle, *self._busy], []
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


class GrammarProcess:
    """A process that tries one grammar at a time (:mod:`labkit.server.grammar_trial_worker`).

    ``is_idle``: whether the process runs and is not trying a grammar.
    """

    def __init__(self, options: TrialOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self.is_idle = False

    async def try_grammar(self, source: GrammarSource) -> str | None:
        """Return the reason that a grammar cannot be enforced, or None.

        Starts the process unless it runs.

        Raises
        ------
        ApiError
            The process does not start (500).
        GrammarError
            The process died. The grammar need not be the cause, so another trial may succeed.
        """
        if self._process is None or self._process.returncode is not None:
            process = await self._start()
        else:
            process = self._process
        self.is_idle = False
        try:
            async with asyncio.timeout(self._options.timeout_s):
                reason = await _exchange(process, source)
        except TimeoutError:
            return (
                f"compilation takes longer than {self._options.timeout_s:g} s "
                "(server.grammar_timeout_s)"
            )
        except EOFError:
            if await process.wait() == OUT_OF_MEMORY:
                return (
                    f"compilation needs more than {self._options.memory_bytes} bytes of memory "
                    "(server.grammar_memory_bytes)"
                )
            raise GrammarError("llguidance failed to compile the grammar") from None
        self.is_idle = True
        return reason

    async def _start(self) -> asyncio.subprocess.Process:
        options = dataclasses.asdict(self._options) | {
            "parent": os.getpid(),
            "started_by_main_thread": threading.current_thread() is threading.main_thread(),
        }
        # A session of its own protects the process from ctrl-C in the terminal. What llguidance
        # writes to standard error may contain a client's grammar.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "labkit.server.grammar_trial_worker", json.dumps(options),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._process = process
        if self._killed:
            process.kill()
        try:
            async with asyncio.timeout(START_S):
                await _read_answer(process)
        except (TimeoutError, EOFError):
            raise ApiError(500, "the process that compiles grammars does not start") from None
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


async def _exchange(process: asyncio.subprocess.Process, source: GrammarSource) -> str | None:
    """Send a grammar to a process and return the answer (see ``GrammarProcess.try_grammar``).

    Raises ``EOFError`` if the process ends.
    """
    assert process.stdin is not None
    process.stdin.write(json.dumps(dataclasses.asdict(source)).encode() + b"\n")
    return await _read_answer(process)


async def _read_answer(process: asyncio.subprocess.Process) -> str | None:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: str | None = json.loads(line)
    return answer
