"""``engine.speculation=random``: random draft tokens, a control for acceptance rates.

On average, one draft token in ``vocab_size`` is accepted. A higher rate means that verification is
wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from labkit.engine.speculation.draft_verification import DraftRequest


class RandomProposer:
    """Proposes random token ids, which depend only on the request's id and number of tokens."""

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._draw(request) for request in draft_requests]

    def _draw(self, request: DraftRequest) -> tuple[int, ...]:
        seed = [zlib.crc32(request.state.request_id.encode()), request.state.num_tokens]
        tokens = np.random.default_rng(seed).integers(0, self._vocab_size, request.limit)
        return tuple(tokens.tolist())
