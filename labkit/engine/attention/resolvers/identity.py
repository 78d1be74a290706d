"""Identity: in a pure decode batch token ``t`` belongs to sequence ``t``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.engine.attention.resolvers import resolver
from labkit.engine.attention.resolvers.resolver import Ints


class Identity(NamedTuple):
    """The lookup: nothing to read but the number of sequences."""

    num_seqs: int


class Resolver(resolver.Resolver):
    """Accepts batches of one query token per sequence, and only those: no Q-blocks."""

    word = "identity"
    kind = Identity

    def lookup(self, cu_seqlens_q: Ints, seq_lens: Ints) -> tuple[Identity, float]:
        """Return the lookup; ValueError if a sequence has no or several query tokens."""
        lengths = np.diff(cu_seqlens_q)
        odd = np.flatnonzero(lengths != 1)
        if len(odd):
            raise ValueError(
                f"resolver=identity: takes pure decode only (one query token per sequence), "
                f"but sequence {odd[0]} has {lengths[odd[0]]}"
            )
        return Identity(len(lengths)), 0.0

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        """Return the unit's own number, twice."""
        return unit, unit, 0
