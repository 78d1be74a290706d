"""Whether all ranks compute the same step: a digest of what each has scheduled.

The layers of two ranks meet in every sum. Ranks that scheduled different steps would add up
numbers that do not belong together, or wait for each other for ever, so nothing is computed
before all have the same digest. It covers the steps before it, and their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from labkit.engine.engine_protocol import Counters
from labkit.engine.scheduler_output import SchedulerOutput


class NoScheduleCheck:
    """One process: there is nobody to agree with."""

    ranks = 1

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        """Let a step begin."""


class ScheduleCheck(NoScheduleCheck):
    """One rank's digests. ``exchange`` sends one and returns when all ranks have the same.

    Counted are ``ranks.agreed``, steps that were agreed on.
    """

    def __init__(self, ranks: int, exchange: Callable[[str], None]) -> None:
        self.ranks = ranks
        self.digest = ""
        self._exchange = exchange

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        """Wait for the other ranks; does not return where they do not compute this step."""
        self.digest = chain_digest(self.digest, scheduled)
        self._exchange(self.digest)
        if scheduled:
            counters.add("ranks.agreed")


def chain_digest(digest: str, scheduled: SchedulerOutput) -> str:
    """Return the digest (32 hex digits) of a step and of those before it, whose is ``digest``.

    Of every chunk: whose tokens, which, how often it was preempted, and the last token known,
    in which what was sampled before shows.
    """
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
    return hashlib.blake2b(repr((digest, chunks)).encode(), digest_size=16).hexdigest()
