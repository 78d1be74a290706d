"""The waiting queue, compared with a sorted list under random adds and removals."""

from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.request import Request, RequestState
from labkit.engine.scheduler.scheduling_policies import QUEUE_KEYS
from labkit.engine.scheduler.waiting_queue import WaitingQueue

# What happens: a request comes, the first is admitted, one is aborted, one is sent back.
HAPPENS = st.lists(st.tuples(st.sampled_from("caxb"), st.integers(0, 3)), max_size=60)


@given(st.sampled_from(list(QUEUE_KEYS)), HAPPENS)
def test_the_queue_behaves_like_a_sorted_list(kind, happens):
    place = QUEUE_KEYS[kind]
    queue, waits, runs, arrival_index = WaitingQueue(place), [], [], 0
    for what, number in happens:
        if what == "c":
            state = RequestState(Request(f"r{arrival_index}", (1,), priority=number), arrival_index)
            arrival_index += 1
            queue.add(state)
            waits.append(state)
        elif what == "a" and waits:
            state = queue.first
            queue.remove(state)
            waits.remove(state)
            assert queue.has_earlier_than(state) == any(
                o.arrival_index < state.arrival_index for o in waits
            )
            runs.append(state)
        elif what == "x" and waits:
            queue.remove(waits.pop(number % len(waits)))
        elif what == "b" and runs:
            state = runs.pop(number % len(runs))
            queue.add(state)
            waits.append(state)
        assert queue.first is min(waits, key=place, default=None)
        assert len(queue) == len(waits) and set(queue) == set(waits)
