"""The arrays of states: what a restored snapshot holds."""

import mlx.core as mx

from labkit.engine.attention.kv_and_state_shapes import StateShape
from labkit.engine.recurrent_states.state_arrays import StateMemory
from labkit.engine.recurrent_states.state_slots import StatePlan, StateSegment, StateSlotManager
from labkit.engine.request import Request, RequestState


def compute(memory, plan, value):
    """Run a step whose states are all ``value`` after it, and return the values before it."""
    step = memory.prepare(plan, None, sum(segment.num_tokens for segment in plan.segments))
    before = []
    for group in step.groups:
        state = group.read(0, 0, 0)
        count = len(group.batch.slots)
        before += [0] * count if state is None else state[:, 0].tolist()
        group.write(0, 0, 0, mx.full((count, 1), value))
    mx.eval(step.pending())
    return before


def test_a_snapshot_that_is_evicted_in_the_step_that_restores_it_is_read():
    slots = StateSlotManager(4, 8)
    memory = StateMemory((StateShape(((1,),), ("float32",)),), 4)
    first, second = (
        slots.reserve(RequestState(Request(name, tuple(range(9))))) for name in ("a", "b")
    )
    snapshot = slots.allocate(first.owner)
    assert compute(memory, StatePlan((StateSegment(first, 0, 4, 0, snapshot),)), 7.0) == [0]
    slots.fork(snapshot, second, 4)
    slots.free(snapshot)  # evicted: the step's plan needs its slot
    later = slots.allocate(first.owner)
    assert later.index == snapshot.index
    segments = StateSegment(first, 4, 1, 0, later), StateSegment(second, 4, 1)
    assert compute(memory, StatePlan(segments, slots.take_forks()), 8.0) == [7.0, 7.0]


def test_a_snapshot_that_is_evicted_before_it_was_written_is_read_by_a_later_step():
    """Where a thread runs the steps, the next one is planned before this one is prepared."""
    slots = StateSlotManager(4, 8)
    memory = StateMemory((StateShape(((1,),), ("float32",)),), 4)
    first, second = (
        slots.reserve(RequestState(Request(name, tuple(range(9))))) for name in ("a", "b")
    )
    snapshot = slots.allocate(first.owner)
    compute(memory, StatePlan((StateSegment(first, 0, 4, 0, snapshot),)), 7.0)
    running = StatePlan((StateSegment(first, 4, 1),))
    slots.fork(snapshot, second, 4)  # planned for the step after
    slots.free(snapshot)
    assert compute(memory, running, 8.0) == [7.0]
    plan = StatePlan((StateSegment(second, 4, 1),), slots.take_forks())
    assert compute(memory, plan, 9.0) == [7.0]
