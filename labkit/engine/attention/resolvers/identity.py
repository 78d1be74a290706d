"""Identity: in a pure decode batch token ``t`` belongs to sequence ``t``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.engine.attention.resolvers.resolver import Ints, Resolver


class IdentityLookup(NamedTuple):
    """The lookup: nothing to read but the number of sequences."""

    num_seqs: int


class IdentityResolver(Resolver):
    """Accepts batches of one query token per sequence, and only those: no Q-blocks."""

    variant = "identity"
    lookup_type = IdentityLookup

    def lookup(self, cu_seqlens_q: Ints, seq_lens: Ints) -> tuple[IdentityLookup, float]:
        """Return the lookup; ValueError if a sequence has no or several query tokens."""
        lengths = np.diff(cu_seqlens_q)
        odd = np.flatnonzero(lengths != 1)
        if len(odd):
            raise ValueError(
                f"resolver=identity: takes pure decode only (one query token per sequence), "
                f"but sequence {odd[0]} has {lengths[odd[0]]}"
            )
        return IdentityLookup(len(lengths)), 0.0

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        """Return the unit's own number, twice."""
        return unit, unit, 0
