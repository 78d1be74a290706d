"""Who drafts tokens, how many a step has room for, and which are kept.

A draft is kept iff it is the very token that the request draws there: its row is sampled by
the request's own parameters and its own random number for the position. For a draft that is
one guess, not a distribution, this is rejection sampling (Leviathan et al. 2023, Chen et al.
2023): a guess d is kept with the target's p(d), and else a token is drawn from p without d.
What is more, the tokens are those of no speculation, greedy or not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_layout.kv_cache_manager import KVCacheManager
from labkit.engine.request import RequestState
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput


class Speculation:
    """Adds drafts to a step before it is built, and judges them; as it is (``none``), adds none."""

    name = "none"

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step with drafts on its decodes."""
        return output

    def accept(
        self, output: SchedulerOutput, drawn: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Return every sampling request's tokens.

        ``drawn``: a token per row of logits, in their order: for each chunk that samples, the
        row of its last token and those of its drafts.
        """
        sampling = [chunk.state.request_id for chunk in output.chunks if chunk.samples]
        return dict(zip(sampling, zip(drawn, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that may be given at most ``limit`` drafts (1 or more)."""

    state: RequestState
    limit: int


class Proposer(Protocol):
    """Guesses what comes next; a wrong guess costs time and nothing else."""

    name: str

    def propose(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """Return up to ``limit`` tokens for each request, in order; () where it has no guess."""


class DraftVerifier(Speculation):
    """Drafts take what a step leaves of its token budget, decode by decode.

    ``num_tokens``: drafts per request and step at most; ``budget``: tokens per step, drafts
    included. ``cache`` says where a request's tokens lie: drafts never need memory that it does
    not hold. Counted are ``spec.drafted`` and ``spec.accepted``, both also by position in the
    draft, and ``spec.draft_ms``.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_tokens: int,
        budget: int,
        cache: KVCacheManager,
        block_size: int,
        counters: Counters,
    ) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._budget = budget
        self._cache = cache
        self._block_size = block_size
        self._counters = counters

    def draft(self, output: SchedulerOutput) -> SchedulerOutput:
        """Ask the proposer for every decode that has room."""
        start = time.perf_counter()
        left = self._budget - output.total_tokens
        wanted = []
        for chunk in output.chunks:
            limit = min(left, self._room(chunk))
            if limit > 0:
                wanted.append(Wanted(chunk.state, limit))
                left -= limit
        if not wanted:
            return output
        proposed = self._proposer.propose(wanted)
        drafts = {
            want.state.request_id: tokens
            for want, tokens in zip(wanted, proposed, strict=True)
            if tokens
        }
        self._counters.add(f"spec.{self._proposer.name}")
        self._counters.add("spec.draft_ms", (time.perf_counter() - start) * 1e3)
        return output._replace(drafts=drafts)

    def _room(self, chunk: ScheduledChunk) -> int:
        """Return how many drafts a chunk's request may be given, the step's budget aside."""
        state = chunk.state
        if not chunk.samples or chunk.is_prefill:
            return 0
        held = len(self._cache.table(state.request_id)) * self._block_size
        # One token is sampled even if every draft is right.
        left = state.request.params.max_tokens - state.num_output_tokens - 1
        return min(self._num_tokens, left, held - state.num_tokens)

    def accept(
        self, output: SchedulerOutput, drawn: Sequence[Sampled]
    ) -> dict[str, Sequence[Sampled]]:
        """Keep each request's drafts up to the first that is not what was drawn."""
        results: dict[str, Sequence[Sampled]] = {}
        row = 0
        for chunk in output.chunks:
            if not chunk.samples:
                continue
            request_id = chunk.state.request_id
            drafts = output.drafts.get(request_id, ())
            own = drawn[row : row + 1 + len(drafts)]
            row += len(own)
            kept = 0
            while kept < len(drafts) and own[kept].token == drafts[kept]:
                kept += 1
            results[request_id] = own[: kept + 1]
            self._count(len(drafts), kept)
        return results

    def _count(self, drafted: int, kept: int) -> None:
        if not drafted:
            return
        self._counters.add_all({"spec.drafted": drafted, "spec.accepted": kept})
        for position in range(drafted):
            self._counters.add(f"spec.drafted.pos{position}")
            self._counters.add(f"spec.accepted.pos{position}", position < kept)
