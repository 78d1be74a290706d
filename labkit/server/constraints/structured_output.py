"""Structured output: token masks from llguidance grammars, computed on the CPU.

A grammar is first tried in a process of its own, before the server compiles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from labkit import config
from labkit.engine.sampling.sampling_params import SamplingError
from labkit.server.constraints.grammar_compiler import (
    GrammarCompiler,
    GrammarError,
    GrammarSource,
    error_text,
)
from labkit.server.killable_process_pool import (
    TaskFailed,
    TaskProcess,
    TooLarge,
    TooSlow,
    WorkerOptions,
    WorkerPool,
)
from labkit.server.types.api_error import invalid

MAX_CACHED_RESULTS = 1024  # of 0.5 kB each at most


class Grammars:
    """Builds grammar constraints for a model's vocabulary.

    A grammar is compiled in a process of its own first, within the limits of ``options``. Only if
    that succeeds is it compiled in this process, in a thread that nothing else uses. The compiled
    grammar is not shared between requests, because it is unusable after it exceeds a limit.
    """

    def __init__(self, options: config.Server, compiler: GrammarCompiler) -> None:
        self._options = options
        self._compiler = compiler
        self._pool = WorkerPool(
            WorkerOptions(
                "labkit.server.constraints.grammar_trial_worker",
                {"compiler": dataclasses.asdict(compiler)},
                "compiling other grammars",
                options.grammar_timeout_s,
                options.grammar_memory_bytes,
            )
        )
        self._results: OrderedDict[bytes, str | None] = OrderedDict()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def load_tokenizer(self) -> None:
        """Read the tokenizer, which holds the GIL. Without it, grammars are refused."""
        with contextlib.suppress(GrammarError):
            _ = self._compiler.tokenizer

    async def from_schema(self, schema: Mapping[str, Any], param: str) -> GrammarConstraint:
        """Return a constraint that enforces a JSON schema.

        ``param`` is the request's field that contains the schema, for error messages. Raises
        ``ApiError`` if llguidance cannot enforce the schema within the limits or the model has no
        end-of-text token (400), or if too many grammars are being compiled (429).
        """
        try:
            text = msgspec.json.encode(schema).decode()
        except RecursionError:
            raise invalid(f"{param}: the schema is nested too deeply", param) from None
        return await self.build(GrammarSource("json_schema", text), param)

    async def from_choices(self, choices: Sequence[str], param: str) -> GrammarConstraint:
        """Return a constraint that allows only these texts; errors as in ``from_schema``."""
        self._check_size(sum(map(len, choices)) + 4 * len(choices), param)
        texts = " | ".join(map(json.JSONEncoder(ensure_ascii=False).encode, choices))
        return await self.build(GrammarSource("lark", f"start: {texts}\n"), param)

    async def build(self, source: GrammarSource, param: str) -> GrammarConstraint:
        """Return a constraint that the entire output matches; errors as in ``from_schema``."""
        if not self._compiler.eos_token_ids:
            raise invalid(f"{param}: the model has no end-of-text token", param)
        self._check_size(len(source.text.encode()), param)
        try:
            await self.check(source)
            matcher = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._compiler.compile, source
            )
        except GrammarError as error:
            raise invalid(f"{param}: the grammar cannot be enforced: {error}", param) from None
        return GrammarConstraint(matcher, self._compiler.eos_token_ids, param)

    async def check(self, source: GrammarSource) -> None:
        """Check in a process that a grammar can be enforced. Cancelling this call ends the trial.

        Raises ``GrammarError`` if the grammar cannot be enforced. Raises ``ApiError`` if all
        processes are busy with other grammars (429), or the server is stopping (503).
        """
        self._pool.check_open()
        key = hashlib.sha256(f"{source.syntax} {source.text}".encode()).digest()
        if key not in self._results:
            async with self._pool.worker() as worker:
                if key not in self._results:  # another request may have tried the same grammar
                    self._results[key] = await self._try(worker, source)
                    if len(self._results) > MAX_CACHED_RESULTS:
                        self._results.popitem(last=False)
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

    def _check_size(self, size: int, param: str) -> None:
        limit = self._options.max_grammar_bytes
        if size > limit:
            raise invalid(
                f"{param}: the grammar has {size} bytes or more; the maximum is {limit} "
                "(server.max_grammar_bytes)",
                param,
            )

    async def close(self) -> None:
        """Kill the processes that try grammars. Requests that wait for them fail (503)."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self._pool.close()


class GrammarConstraint:
    """A grammar and its parser state after a request's output so far.

    Implements ``labkit.engine.sampling.sampling_params.Constraint``. ``param`` is the request's
    field that contains the grammar, for error messages.
    """

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], param: str) -> None:
        self._matcher = matcher
        self._param = param
        self._eos_token_ids = list(eos_token_ids)
        self._consumed: list[int] = []

    def copy(self) -> GrammarConstraint:
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarConstraint(matcher, self._eos_token_ids, self._param)

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Return a boolean mask over the vocabulary: which token ids may follow ``output``.

        If the grammar is complete after ``output``, only end-of-text ids may follow. Raises
        ``SamplingError`` if ``output`` violates the grammar, or the grammar exceeds a limit of
        llguidance.
        """
        self._advance(output)
        mask = np.zeros(vocab_size, np.bool_)
        if self._matcher.is_stopped():
            mask[self._eos_token_ids] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little")
            mask[: len(allowed)] = allowed
        # After an error, llguidance allows the end-of-text ids: the output would end anywhere.
        if self._matcher.is_error():
            reason = error_text(self._matcher)
            raise SamplingError(f"{self._param}: the grammar cannot be enforced: {reason}")
        return mask

    def _advance(self, output: Sequence[int]) -> None:
        """Roll the matcher back to the prefix shared with ``output``, then feed it the rest.

        Draft tokens may violate the grammar. The matcher then stays before the first such token,
        so that it can continue with other tokens.
        """
        tokens = list(output)
        if tokens[: len(self._consumed)] != self._consumed:
            pairs = zip(self._consumed, tokens, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        new_tokens = tokens[len(self._consumed) :]
        num_consumed = self._matcher.try_consume_tokens(new_tokens) if new_tokens else 0
        self._consumed += new_tokens[:num_consumed]
        if num_consumed < len(new_tokens) and not self._matcher.is_error():
            raise SamplingError(f"{self._param}: the output violates the grammar")
