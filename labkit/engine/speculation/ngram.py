"""``engine.speculation=ngram``: prompt lookup decoding (Saxena 2023).

The proposer takes the last n tokens of a request, with the largest n for which the same n tokens
occur earlier in the request. The draft is the tokens that followed the earlier occurrence. For
example, after ``1 2 3 4 1 2`` the draft is ``3 4 1``.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.engine.request import RequestState, RequestStatus
from labkit.engine.speculation.propose_and_verify import DraftRequest


class NgramProposer:
    """Proposes the tokens that followed the latest earlier occurrence of a request's last n-gram.

    An n-gram has ``min_size`` to ``max_size`` tokens. Longer n-grams are tried first.
    """

    name = "ngram"

    def __init__(self, min_size: int, max_size: int) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._indexes: dict[str, _NgramIndex] = {}

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        running = RequestStatus.running
        self._indexes = {k: i for k, i in self._indexes.items() if i.state.status is running}
        drafts = []
        for request in draft_requests:
            index = self._indexes.get(request.state.request_id)
            if index is None:
                index = self._indexes[request.state.request_id] = _NgramIndex(
                    request.state, self._sizes
                )
            drafts.append(index.find(request.limit))
        return drafts


class _NgramIndex:
    """The n-grams of a request's tokens, each with the index after its last occurrence."""

    def __init__(self, state: RequestState, sizes: range) -> None:
        self.state = state
        self._sizes = sizes
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def find(self, limit: int) -> tuple[int, ...]:
        tokens = self.state.token_ids
        for follower in range(self._num_indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= follower:
                    self._followers[tuple(tokens[follower - size : follower])] = follower
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for size in self._sizes:
            start = self._followers.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                return _continuation(tokens, start, limit)
        return ()


def _continuation(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    drafts = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return tuple(drafts)
