"""Snapshots of states: which chunks leave one, and which are freed."""

import pytest

from labkit.engine.recurrent_states.state_slots import StateSlotManager
from labkit.engine.recurrent_states.state_snapshots import StateSnapshots
from labkit.engine.request import Request, RequestState
from labkit.engine.scheduler.scheduler_output import ScheduledChunk


def state_of(name="a", tokens=40):
    return RequestState(Request(name, tuple(range(tokens))))


class Prefixes:
    """Snapshots over a prefix cache that has every block of one sequence: block i + 1 at i."""

    def __init__(self, capacity=2, unit=4):
        self.slots = StateSlotManager(8, 1)
        self.cached = True
        self.snapshots = StateSnapshots(
            self.slots, capacity, 4, unit, lambda _tokens, count: count if self.cached else None
        )

    def compute(self, state, start, count):
        """Plan a chunk's snapshot, then let it be computed."""
        slot = self.snapshots.plan(ScheduledChunk(state, start, count))
        state.num_computed_tokens = start + count
        self.snapshots.attach(state)
        return slot


def test_a_snapshot_is_found_by_the_block_at_its_end():
    prefixes, state = Prefixes(), state_of()
    assert prefixes.compute(state, 0, 7) is None  # not the end of a block
    slot = prefixes.compute(state, 7, 5)
    assert slot is not None
    assert prefixes.snapshots.count_usable([1, 2, 3, 4, 5]) == 3
    assert prefixes.snapshots.count_usable([1, 2]) == 0
    assert prefixes.snapshots.restore(3) is slot
    prefixes.snapshots.drop([3, 4])
    assert slot.is_free and prefixes.snapshots.count_usable([1, 2, 3]) == 0
    assert prefixes.slots.num_free == 8


def test_a_snapshot_of_a_block_that_is_not_cached_is_freed():
    prefixes, state = Prefixes(), state_of()
    prefixes.cached = False
    slot = prefixes.compute(state, 0, 8)
    assert slot.is_free


def test_a_snapshot_waits_for_its_block_and_goes_with_its_request():
    prefixes, state = Prefixes(), state_of()
    slot = prefixes.snapshots.plan(ScheduledChunk(state, 0, 8))
    prefixes.snapshots.attach(state)  # the chunk is still in flight
    assert not slot.is_free and prefixes.snapshots.count_usable([1, 2]) == 0
    prefixes.snapshots.release("a")
    assert slot.is_free


def test_a_known_prefix_gets_no_second_snapshot():
    prefixes = Prefixes()
    prefixes.compute(state_of("a"), 0, 8)
    assert prefixes.compute(state_of("b"), 0, 8) is None


def test_the_snapshot_used_longest_ago_makes_room():
    prefixes, state = Prefixes(capacity=2), state_of()
    first = prefixes.compute(state, 0, 4)
    second = prefixes.compute(state, 4, 4)
    prefixes.snapshots.restore(1)
    prefixes.compute(state, 8, 4)
    assert second.is_free and not first.is_free
    assert prefixes.snapshots.counters()["state_snapshots.evicted"] == 1


def test_of_the_output_only_the_last_snapshot_is_kept():
    prefixes, state = Prefixes(capacity=4), state_of(tokens=8)
    prompt = prefixes.compute(state, 0, 8)
    state.token_ids += range(8)
    first = prefixes.compute(state, 15, 1)
    state.token_ids += range(4)
    second = prefixes.compute(state, 19, 1)
    assert first.is_free and not prompt.is_free and not second.is_free


def test_a_decoding_request_leaves_the_snapshot_of_another_in_a_block_that_was_reused():
    prefixes, state = Prefixes(capacity=4), state_of(tokens=8)
    state.token_ids += range(8)
    own = prefixes.compute(state, 15, 1)  # at block 4
    prefixes.snapshots.drop([4])  # evicted: the request's own copy of the block replaced it
    other = prefixes.compute(state_of("b"), 8, 8)  # block 4 is this request's now
    state.token_ids += range(4)
    prefixes.compute(state, 19, 1)
    assert own.is_free and not other.is_free
    assert prefixes.snapshots.restore(4) is other


@pytest.mark.parametrize(
    ("tokens", "start", "count", "expected"),
    [
        (40, 0, 40, 36),  # the last block's end before the last token
        (40, 36, 4, 4),
        (40, 0, 11, 8),
        (40, 0, 3, 3),  # no end of a block in reach
        (40, 8, 4, 4),
        (41, 0, 41, 40),
        (3, 0, 3, 3),
    ],
)
def test_chunks_of_prompts_end_where_a_snapshot_is_taken(tokens, start, count, expected):
    assert Prefixes().snapshots.align_chunk(state_of(tokens=tokens), start, count) == expected


def test_reused_prefixes_are_multiples_of_the_unit():
    prefixes, state = Prefixes(unit=8), state_of()
    assert prefixes.compute(state, 0, 4) is None
    assert prefixes.compute(state, 4, 4) is not None
    assert prefixes.snapshots.align_chunk(state, 8, 30) == 24
    assert prefixes.snapshots.count_usable([1, 2, 3]) == 2
