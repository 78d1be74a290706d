"""Unit -> sequence as identity: unit ``t`` of a decode batch is the token of sequence ``t``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.engine.attention.sequence_resolvers.sequence_resolver import Int32Array, Resolver


class IdentityLookup(NamedTuple):
    """The lookup: the number of sequences."""

    num_seqs: int


class IdentityResolver(Resolver):
    """Accepts only batches of one query token per sequence, which have no Q-blocks."""

    variant = "identity"
    lookup_type = IdentityLookup

    def lookup(
        self, cu_seqlens_q: Int32Array, seq_lens: Int32Array
    ) -> tuple[IdentityLookup, float]:
        """Return the lookup. Raises ``ValueError`` unless every sequence has one query token."""
        lengths = np.diff(cu_seqlens_q)
        not_one = np.flatnonzero(lengths != 1)
        if len(not_one):
            raise ValueError(
                f"resolver=identity handles decode only (one query token per sequence), "
                f"but sequence {not_one[0]} has {lengths[not_one[0]]}"
            )
        return IdentityLookup(len(lengths)), 0.0

    @staticmethod
    def find_token(lookup: Any, unit: int, cu: Any) -> Any:
        return unit, unit, 0
