"""A check before each step that all ranks have scheduled the same tokens.

The ranks sum partial results in every layer. Ranks that scheduled different steps would sum
unrelated numbers, or wait for each other for ever. So no rank computes a step before all ranks have
the same digest of this step and of all steps before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from labkit.engine.engine_protocol import Counters
from labkit.engine.scheduler.scheduler_output import SchedulerOutput


class NoScheduleCheck:
    """The check of an engine in a single process, which has nothing to compare."""

    ranks = 1

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        """Do nothing."""


class ScheduleCheck(NoScheduleCheck):
    """The check of one rank, which compares its schedule digest with the other ranks'.

    ``digest``: the digest of all steps so far. The counter ``ranks.agreed`` counts compared steps.

    ``ranks``: the number of ranks. ``wait_at``: sends a digest and returns once all ranks have sent
    the same digest.
    """

    def __init__(self, ranks: int, wait_at: Callable[[str], None]) -> None:
        self.ranks = ranks
        self.digest = ""
        self._wait_at = wait_at

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        self.digest = _chain_digest(self.digest, scheduled)
        self._wait_at(self.digest)
        if scheduled:
            counters.add("ranks.agreed")


def _chain_digest(digest: str, scheduled: SchedulerOutput) -> str:
    """Return the digest, 32 hex digits, of a step and all steps before it.

    ``digest`` is the digest of the steps before it. For every chunk, the result covers the request,
    the token range, the preemptions, the request's number of tokens and its last token, which
    depends on everything sampled before.
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
