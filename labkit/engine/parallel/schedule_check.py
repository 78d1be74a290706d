"""A check before each step that all ranks have scheduled the same tokens.

The ranks sum partial results in every layer. Ranks that scheduled different steps would sum
unrelated numbers, or wait for each other for ever. So no rank computes before all have the same
digest; it covers this step, all steps before it and their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from labkit.engine.engine_protocol import Counters
from labkit.engine.scheduler_output import SchedulerOutput


class NoScheduleCheck:
    """The check of a single process: nothing to compare."""

    ranks = 1

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        """Return at once."""


class ScheduleCheck(NoScheduleCheck):
    """Compares one rank's schedule digest with the other ranks' before every step.

    It counts the compared steps in ``ranks.agreed``.

    Parameters
    ----------
    ranks
        The number of ranks.
    wait_at
        Sends a digest and returns once all ranks have sent the same.
    """

    def __init__(self, ranks: int, wait_at: Callable[[str], None]) -> None:
        self.ranks = ranks
        self.digest = ""
        self._wait_at = wait_at

    def check_step(self, scheduled: SchedulerOutput, counters: Counters) -> None:
        """Wait for the other ranks; returns only if they have scheduled the same step."""
        self.digest = chain_digest(self.digest, scheduled)
        self._wait_at(self.digest)
        if scheduled:
            counters.add("ranks.agreed")


def chain_digest(digest: str, scheduled: SchedulerOutput) -> str:
    """Return the digest (32 hex digits) of a step, chained to ``digest`` of the steps before it.

    It covers, for every chunk: the request, the token range, the preemptions, the number of tokens
    and the last token, which depends on everything sampled before.
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
