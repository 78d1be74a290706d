"""A request's token ids, and its own state: what it has left to compute."""

import numpy as np
import pytest

from labkit.engine.request import Request, RequestState
from labkit.engine.sampling.sampling_params import SamplingParams


def test_token_ids_are_plain_integers():
    assert Request("a", [np.int32(1), 2]).prompt_token_ids == (1, 2)
    with pytest.raises(ValueError, match=r"prompt_token_ids: 1\.5 is not an integer"):
        Request("a", (1, 1.5))


def test_a_new_request_has_computed_nothing():
    state = RequestState(Request("a", (5, 6, 7)), 4)
    assert (state.request_id, state.queue_key, state.arrival_index) == ("a", (0, 4), 4)
    assert (state.token_ids, state.num_prompt_tokens, state.num_tokens) == ([5, 6, 7], 3, 3)
    counts = {name for name in RequestState.__slots__ if name.startswith("num_")}
    zero = counts - {"num_prompt_tokens"}
    assert {getattr(state, name) for name in zero} == {0} and state.scored_parts == []


@pytest.mark.parametrize(
    ("outputs", "computed", "in_flight", "placeholders", "pending", "is_prefill"),
    [
        (0, 0, 0, 0, 3, True),  # a prompt of 3 tokens
        (0, 2, 0, 0, 1, True),
        (0, 1, 2, 1, 1, False),  # the step in flight samples the first token
        (0, 3, 0, 0, 0, False),
        (1, 3, 0, 0, 1, False),
        (1, 3, 1, 1, 1, False),
        (2, 0, 0, 0, 5, True),  # preempted
        (2, 2, 1, 0, 2, True),
        (2, 3, 1, 0, 1, False),
        (3, 4, 1, 1, 0, False),  # the fourth token is the last, and never computed
        (4, 5, 0, 0, 0, True),
    ],
)
def test_what_a_request_has_left_to_compute(
    outputs, computed, in_flight, placeholders, pending, is_prefill
):
    state = RequestState(Request("a", (5, 6, 7), SamplingParams(max_tokens=4)))
    state.token_ids += range(outputs)
    state.num_computed_tokens, state.num_in_flight_tokens = computed, in_flight
    state.num_output_placeholders = placeholders
    assert (state.num_pending_tokens, state.is_prefill) == (pending, is_prefill)
    assert (state.num_output_tokens, state.num_tokens) == (outputs, 3 + outputs)
    assert state.num_scheduled_tokens == computed + in_flight
    assert state.num_prefill_tokens == max(3, 2 + outputs)
    assert state.max_kv_tokens == 6
    longer = state.with_output([8, 9])
    assert longer.token_ids == [*state.token_ids, 8, 9] and longer.num_prompt_tokens == 3
    assert state.num_tokens == 3 + outputs
