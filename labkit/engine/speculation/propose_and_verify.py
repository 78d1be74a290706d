"""Draft and verify: add draft tokens within the token budget, and accept correct ones.

The target samples a token in the row before each draft token, with the request's own parameters
and its own random number for the position. A draft token is accepted iff it equals that sample.
Since a draft token is one guess, not a distribution, this is rejection sampling (Leviathan et al.
2023, Chen et al. 2023): the guess d is accepted with probability p(d), where p is the target's
distribution; otherwise a token is drawn from p without d. Moreover, the output tokens are the same
as without speculation, greedy or not.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_cache_interface import KVCacheManager
from labkit.engine.request import RequestState
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.scheduler.scheduler import is_stop
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput


class Speculator:
    """Adds draft tokens to a step and verifies them. This base class (``none``) adds none."""

    name = "none"

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        return output

    def accept(
        self, output: SchedulerOutput, sampled: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Return the new tokens of every chunk that samples, by request id.

        ``sampled`` has a token per row of logits. Each chunk that samples has a row for its last
        token, followed by a row for each of its draft tokens.
        """
        sampling = [chunk.state.request_id for chunk in output.chunks if chunk.samples]
        return dict(zip(sampling, zip(sampled, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that has room for ``limit`` draft tokens (1 or more)."""

    state: RequestState
    limit: int


class Proposer(Protocol):
    """Proposes draft tokens. A wrong draft token costs time, but never changes the output."""

    name: str

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Return, for each request in order, up to ``limit`` draft tokens (possibly none)."""


class DraftVerifier(Speculator):
    """Adds draft tokens within the rest of a step's token budget, and verifies them.

    The counters are ``spec.draft_ms``, ``spec.drafted`` and ``spec.accepted``. The latter two are
    also counted by position in the draft.

    ``proposer``: proposes the draft tokens. ``num_tokens``: the largest number of draft tokens per
    request and step. ``budget``: the largest number of tokens per step, including draft tokens.
    ``cache``: the KV cache. Draft tokens use only memory that is reserved for the request already.
    ``counters``: the engine's counters. ``eos_token_ids``: as in ``Scheduler``.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_tokens: int,
        budget: int,
        cache: KVCacheManager,
        counters: Counters,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._budget = budget
        self._cache = cache
        self._counters = counters
        self._eos_token_ids = eos_token_ids

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        """Add draft tokens to every decode that has room, within the step's token budget."""
        start = time.perf_counter()
        left = self._budget - output.total_tokens
        draft_requests = []
        for chunk in output.chunks:
            limit = min(left, self._room(chunk))
            if limit > 0:
                draft_requests.append(DraftRequest(chunk.state, limit))
                left -= limit
        if not draft_requests:
            return output
        proposed = self._proposer.propose(draft_requests)
        drafts = {
            request.state.request_id: tokens
            for request, draft in zip(draft_requests, proposed, strict=True)
            if (tokens := self._before_end(request.state, draft))
        }
        self._counters.add(f"spec.{self._proposer.name}")
        self._counters.add("spec.draft_ms", (time.perf_counter() - start) * 1e3)
        return output._replace(drafts=drafts)

    def _room(self, chunk: ScheduledChunk) -> int:
        """Return the number of draft tokens that fit a chunk, ignoring the step's budget."""
        state = chunk.state
        if (
            not chunk.samples
            or chunk.is_prefill
            or state.request.params.prompt_logprobs is not None
        ):
            return 0
        num_slots = self._cache.num_slots(self._cache.table(state.request_id))
        # One more token is sampled even if every draft token is accepted.
        left = state.request.params.max_tokens - state.num_output_tokens - 1
        return min(self._num_tokens, left, num_slots - state.num_tokens)

    def _before_end(self, state: RequestState, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Return the draft tokens before the first that would end the request.

        That token needs no row: it is sampled in the row before it, and nothing follows it.
        """
        ids = self._eos_token_ids
        return tuple(takewhile(lambda token: not is_stop(state, token, ids), draft))

    def accept(
        self, output: SchedulerOutput, sampled: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Return each request's samples up to the first that differs from its draft token."""
        results: dict[str, Sequence[Sampled]] = {}
        row = 0
        for chunk in output.chunks:
            if not chunk.samples:
                continue
            request_id = chunk.state.request_id
            drafts = output.drafts.get(request_id, ())
            tokens = sampled[row : row + 1 + len(drafts)]
            row += len(tokens)
            accepted = 0
            while accepted < len(drafts) and tokens[accepted].token == drafts[accepted]:
                accepted += 1
            results[request_id] = tokens[: accepted + 1]
            self._count(len(drafts), accepted)
        return results

    def _count(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self._counters.add_all({"spec.drafted": drafted, "spec.accepted": accepted})
        for position in range(drafted):
            self._counters.add(f"spec.drafted.pos{position}")
            self._counters.add(f"spec.accepted.pos{position}", position < accepted)


class RandomProposer:
    """Proposes random token ids, which depend only on the request's id and number of tokens.

    A control for acceptance rates: on average, one draft token in ``vocab_size`` is accepted. A
    higher rate means that verification is wrong.
    """

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._draw(request) for request in draft_requests]

    def _draw(self, request: DraftRequest) -> tuple[int, ...]:
        seed = [zlib.crc32(request.state.request_id.encode()), request.state.num_tokens]
        tokens = np.random.default_rng(seed).integers(0, self._vocab_size, request.limit)
        return tuple(tokens.tolist())
