"""Trials of grammars in processes of their own, before the server compiles them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from labkit import config
from labkit.server.constraints.grammar_compiler import GrammarError, GrammarSource
from labkit.server.task_processes import (
    TaskFailed,
    TaskProcess,
    TooLarge,
    TooSlow,
    WorkerOptions,
    WorkerPool,
)

MAX_CACHED_RESULTS = 1024  # of 0.5 kB each at most


class GrammarProcesses:
    """Finds out whether a grammar can be enforced within the limits of time and memory.

    ``options``: the server's part of the config. ``tokenizer_json``: the model's tokenizer.json.
    ``vocab_size``, ``eos_token_ids``: the model's vocabulary size and end-of-text token ids.
    """

    def __init__(
        self,
        options: config.Server,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._options = options
        setup = {
            "tokenizer_json": str(tokenizer_json),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._pool = WorkerPool(
            WorkerOptions(
                "labkit.server.constraints.grammar_trial_worker",
                setup,
                "compiling other grammars",
                options.grammar_timeout_s,
                options.grammar_memory_bytes,
            )
        )
        self._results: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, source: GrammarSource) -> None:
        """Check that a grammar can be enforced. Cancelling this call ends the trial.

        Raises ``GrammarError`` if the grammar cannot be enforced. Raises ``ApiError`` if all
        processes are busy with other grammars (429), or the server is stopping (503).
        """
        self._pool.check_open()
        key = hashlib.sha256(f"{source.syntax} {source.text}".encode()).digest()
        if key not in self._results:
            async with self._pool.worker() as worker:
                if key not in self._results:  # another request may have tried the same grammar
                    self._store(key, await self._try(worker, source))
        self._results.move_to_end(key)
        reason = self._results[key]
        if reason is not None:
            raise GrammarError(reason)

    async def _try(self, worker: TaskProcess, source: GrammarSource) -> str | None:
        """Return the reason that a grammar cannot be enforced, or None.

        Raises ``GrammarError`` if another trial may succeed, when the machine is less busy.
        """
        try:
            reason: str | None = await worker.answer(dataclasses.asdict(source))
            return reason
        except TooLarge:
            return (
                f"compilation needs more than {self._options.grammar_memory_bytes} bytes of memory "
                "(server.grammar_memory_bytes)"
            )
        except TooSlow:
            raise GrammarError(
                f"compilation takes longer than {self._options.grammar_timeout_s:g} s "
                "(server.grammar_timeout_s)"
            ) from None
        except TaskFailed:
            raise GrammarError("llguidance failed to compile the grammar") from None

    def _store(self, key: bytes, reason: str | None) -> None:
        self._results[key] = reason
        if len(self._results) > MAX_CACHED_RESULTS:
            self._results.popitem(last=False)

    async def close(self) -> None:
        """Kill the processes. Calls of ``check`` that wait for them raise ``ApiError`` (503)."""
        await self._pool.close()
