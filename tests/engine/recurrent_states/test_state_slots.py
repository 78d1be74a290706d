"""Slots of states: accounting, and leaks."""

import pytest

from labkit.engine.recurrent_states.state_slots import StateSlotManager
from labkit.engine.request import Request, RequestState


def state_of(name="a", tokens=40):
    return RequestState(Request(name, tuple(range(tokens))))


def test_a_slot_is_given_once_and_freed_once():
    slots = StateSlotManager(2, 100)
    first, second = (slots.reserve(state_of(name)) for name in "ab")
    assert {first.index, second.index} == {0, 1}
    assert (slots.num_free, slots.num_used, slots.reserved_bytes) == (0, 2, 200)
    with pytest.raises(ValueError, match="none of 2 state slots is free"):
        slots.reserve(state_of("c"))
    with pytest.raises(ValueError, match="request a has a state slot already"):
        slots.reserve(state_of("a"))
    slots.release("a")
    slots.release("a")  # finish, abort and preempt may meet
    assert first.is_free and slots.num_free == 1
    with pytest.raises(ValueError, match="is free already"):
        slots.free(first)
    again = slots.reserve(state_of("c"))
    assert again.index == first.index and again is not first
    slots.check({"b", "c"})
    assert slots.counters()["state_slots.allocated"] == 3


@pytest.mark.parametrize("running", [set(), {"a", "b"}])
def test_a_slot_without_a_request_is_a_leak(running):
    slots = StateSlotManager(2, 100)
    slots.reserve(state_of("a"))
    with pytest.raises(AssertionError, match="requests with state slots: "):
        slots.check(running)


def test_a_slot_that_nobody_has_is_a_leak():
    slots = StateSlotManager(2, 100)
    lost = slots.allocate(state_of("a"))
    with pytest.raises(AssertionError, match="leaked"):
        slots.check(set())
    slots.check(set(), [lost])
