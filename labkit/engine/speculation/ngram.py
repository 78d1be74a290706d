"""``engine.speculation=ngram``: what followed the last time the request's text went so.

Prompt lookup decoding (Saxena 2023): the longest n-gram at the end of a request's tokens
that occurred in them before; what followed it is the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.request import RequestState, RequestStatus
from labkit.engine.speculation.draft_verification import Wanted


class Ngram:
    """Looks drafts up in the request's own tokens, the latest occurrence first.

    ``smallest``, ``largest``: tokens in an n-gram; longer ones are tried first.
    """

    name = "ngram"

    def __init__(self, smallest: int, largest: int) -> None:
        self._sizes = range(largest, smallest - 1, -1)
        self._indexes: dict[str, _Index] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """Return what followed; see ``Proposer``."""
        running = RequestStatus.running
        self._indexes = {k: i for k, i in self._indexes.items() if i.state.status is running}
        drafts = []
        for want in wanted:
            index = self._indexes.get(want.state.request_id)
            if index is None:
                index = self._indexes[want.state.request_id] = _Index(want.state, self._sizes)
            drafts.append(index.find(want.limit))
        return drafts


class _Index:
    """Where each n-gram of one request's tokens was last followed by something."""

    def __init__(self, state: RequestState, sizes: range) -> None:
        self.state = state
        self._sizes = sizes
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, limit: int) -> tuple[int, ...]:
        tokens = self.state.token_ids
        for follower in range(self._indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= follower:
                    self._next[tuple(tokens[follower - size : follower])] = follower
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in self._sizes:
            start = self._next.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                return _go_on(tokens, start, limit)
        return ()


def _go_on(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Return ``count`` tokens from ``start`` on; past the end, the repetition goes on."""
    drafts = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return tuple(drafts)
