"""N-gram drafts: the tokens that followed the longest earlier match."""

import numpy as np
import pytest

from labkit.engine import Request
from labkit.engine.request import RequestState, RequestStatus
from labkit.engine.speculation.ngram import NgramProposer
from labkit.engine.speculation.propose_and_verify import DraftRequest


def wanted(tokens, limit, prompt=1):
    state = RequestState(Request("a", tuple(tokens[:prompt])))
    state.token_ids = list(tokens)
    state.status = RequestStatus.running
    return DraftRequest(state, limit)


@pytest.mark.parametrize(
    ("tokens", "limit", "draft"),
    [
        ([1, 2, 3, 4, 1, 2], 3, (3, 4, 1)),  # the longest n-gram that came before
        ([1, 2, 9, 5, 2, 7, 1, 2], 2, (9, 5)),  # two tokens beat one, though it is later
        ([5, 2, 7, 5, 2, 8, 2], 2, (8, 2)),  # the latest of equals
        ([4, 4, 4], 5, (4, 4, 4, 4, 4)),  # a loop goes on past its end
        ([1, 2, 3], 4, ()),
        ([1], 4, ()),
    ],
)
def test_ngram_drafts_the_tokens_that_followed(tokens, limit, draft):
    assert NgramProposer(1, 3).propose([wanted(tokens, limit)]) == [draft]


def test_ngram_keeps_up_with_a_growing_request_and_forgets_a_finished_one():
    ngram, rng = NgramProposer(1, 3), np.random.default_rng(0)
    want = wanted(rng.integers(0, 4, 5).tolist(), 4)
    for token in rng.integers(0, 4, 60).tolist():
        want.state.token_ids.append(token)
        assert ngram.propose([want]) == NgramProposer(1, 3).propose([want])
    want.state.status = RequestStatus.finished
    ngram.propose([wanted([1, 2, 1], 2)])
    assert ngram._indexes["a"].state is not want.state
