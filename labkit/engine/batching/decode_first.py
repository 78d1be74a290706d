"""Decodes first: running requests never wait for a prompt that shares their step."""

from __future__ import annotations

from labkit.engine.batching.base import DECODE_FIRST, PREFILL_FIRST, Phase, Phases


class DecodeFirst:
    """Decodes draw on the budget first; with steps of their own, the two take turns.

    Taking turns bounds the wait of both: strict precedence of decodes would admit nobody
    until every running request has ended.
    """

    name = "decode_first"

    def sharing(self) -> Phases:
        """See ``Order.sharing``."""
        return DECODE_FIRST

    def turns(self, last: Phase | None) -> Phases:
        """See ``Order.turns``."""
        return PREFILL_FIRST if last is Phase.decode else DECODE_FIRST
