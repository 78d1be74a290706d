"""Random drafts, the control for acceptance rates."""

from collections import Counter

from labkit.engine.request import Request, RequestState
from labkit.engine.speculation.propose_and_verify import DraftRequest, RandomProposer


def wanted(name, length, limit):
    return DraftRequest(RequestState(Request(name, tuple(range(length)))), limit)


def test_drafts_are_uniform_and_depend_on_the_request_and_position_only():
    drafts = RandomProposer(5).propose([wanted("a", length, 4) for length in range(1, 500)])
    counted = Counter(token for draft in drafts for token in draft)
    assert set(counted) == set(range(5)) and min(counted.values()) > 320
    assert {len(draft) for draft in drafts} == {4}
    (repeated, other) = RandomProposer(5).propose([wanted("a", 7, 4), wanted("b", 7, 4)])
    assert repeated == drafts[6] != other
