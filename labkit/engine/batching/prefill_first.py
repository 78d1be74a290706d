"""Prompts first: a new request's first token is never kept waiting by decodes."""

from __future__ import annotations

from labkit.engine.batching.base import PREFILL_FIRST, Phase, Phases


class PrefillFirst:
    """Prompts draw on the budget first; with steps of their own, decodes wait for them."""

    name = "prefill_first"

    def sharing(self) -> Phases:
        """See ``Order.sharing``."""
        return PREFILL_FIRST

    def turns(self, last: Phase | None) -> Phases:
        """See ``Order.turns``."""
        return PREFILL_FIRST
