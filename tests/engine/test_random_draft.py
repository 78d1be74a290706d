"""Random drafts: the control of every acceptance."""

from collections import Counter

from labkit.engine.request import Request, RequestState
from labkit.engine.speculation.draft_verification import DraftRequest
from labkit.engine.speculation.random_draft import RandomProposer


def wanted(name, length, limit):
    return DraftRequest(RequestState(Request(name, tuple(range(length)))), limit)


def test_drafts_are_drawn_evenly_and_from_the_request_and_its_place_alone():
    drafts = RandomProposer(5).propose([wanted("a", length, 4) for length in range(1, 500)])
    counted = Counter(token for draft in drafts for token in draft)
    assert set(counted) == set(range(5)) and min(counted.values()) > 320
    assert {len(draft) for draft in drafts} == {4}
    (again, other) = RandomProposer(5).propose([wanted("a", 7, 4), wanted("b", 7, 4)])
    assert again == drafts[6] != other
