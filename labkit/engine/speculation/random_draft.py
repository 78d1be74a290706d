"""``engine.speculation=random``: drafts of random tokens, the control of every acceptance.

One in as many as there are ids is right by chance. Where more are accepted, it is not the drafts
that are judged.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from labkit.engine.speculation.draft_verification import Wanted


class RandomDraft:
    """Drafts ids below ``vocab_size``, drawn from the request's id and length alone."""

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """Return as many as there is room for; see ``Proposer``."""
        return [self._draw(want) for want in wanted]

    def _draw(self, want: Wanted) -> tuple[int, ...]:
        seed = [zlib.crc32(want.state.request_id.encode()), want.state.num_tokens]
        drawn = np.random.default_rng(seed).integers(0, self._vocab_size, want.limit)
        return tuple(drawn.tolist())
