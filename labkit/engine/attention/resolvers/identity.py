"""Identity: in a pure decode batch token ``t`` belongs to sequence ``t``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Identity(NamedTuple):
    """The lookup: nothing to read but the number of sequences."""

    num_seqs: int

    def sequence_of_tokens(self, total_q: int) -> NDArray[np.int64]:
        """Return the owner of every token: itself."""
        return np.arange(total_q)


class IdentityResolver:
    """Accepts batches of one query token per sequence, and only those."""

    name = "identity"

    def lookup(
        self, cu_seqlens_q: NDArray[np.int32], seq_lens: NDArray[np.int32], bq: int
    ) -> tuple[Identity, float]:
        """Return the lookup.

        Raises
        ------
        ValueError
            A sequence has no or several query tokens.
        """
        lengths = np.diff(cu_seqlens_q)
        odd = np.flatnonzero(lengths != 1)
        if len(odd):
            raise ValueError(
                f"resolver=identity: takes pure decode only (one query token per sequence), "
                f"but sequence {odd[0]} has {lengths[odd[0]]}"
            )
        return Identity(len(lengths)), 0.0
