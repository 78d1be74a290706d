"""Sampling parameters at their limits, and what follows from them."""

import math
import pickle

import numpy as np
import pytest

from labkit.engine.sampling.sampling_params import SamplingParams

ACCEPTED = {
    "temperature": (0, 0.5, 1e9),
    "top_k": (0, 1, np.int64(5)),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 1, 10.0),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 1000),
    "max_tokens": (1,),
    "seed": (None, 0, (1 << 64) - 1),
    "logit_bias": ({}, {0: -1e9}),
    "stop": ((), "a", ["a", "b"]),
    "stop_token_ids": ((), (0,), [np.int32(3)]),
}
REFUSED = {
    "temperature": (-1e-9, math.inf, math.nan, 10**400, "1", None),
    "top_k": (-1, 1.0, None),
    "top_p": (0, 1.0001, math.nan, None),
    "min_p": (-1e-9, 1.0001, None),
    "repetition_penalty": (0, math.inf, 10**400, None),
    "presence_penalty": (-2.0001, 2.0001, "0"),
    "frequency_penalty": (-2.0001, 2.0001, "0"),
    "logprobs": (-1, 21, 1.5),
    "prompt_logprobs": (-1, 1.5),
    "max_tokens": (0, 1.5, None),
    "seed": (-1, 1 << 64, 1.5),
    "logit_bias": (
        {-1: 0.0}, {0: math.inf}, {0: 10**400}, {0: "1"}, {"0": 1.0}, None, [1, 2],
        np.zeros((2, 2)),
    ),
    "stop": ("", ["a", ""], [1], None, 5),
    "stop_token_ids": ((1.5,), ("a",), np.zeros((2, 99), int), None, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_parameter_is_accepted_within_its_limits(name):
    for value in ACCEPTED[name]:
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_is_refused_beyond_its_limits_and_of_another_type(name):
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=rf"^{name}") as refused:
            SamplingParams(**{name: value})
        assert "\n" not in str(refused.value)


def test_ids_to_score_need_scores():
    ids = np.zeros((1, 2), np.int32)
    assert SamplingParams(prompt_logprobs=0, prompt_logprob_ids=ids).prompt_logprob_ids is ids
    with pytest.raises(ValueError, match="prompt_logprob_ids needs prompt_logprobs"):
        SamplingParams(prompt_logprob_ids=ids)
    for wrong in ([[1]], 1, np.zeros((1, 1))):
        with pytest.raises(ValueError, match="prompt_logprob_ids: not a NumPy array of integers"):
            SamplingParams(prompt_logprobs=0, prompt_logprob_ids=wrong)


@pytest.mark.parametrize(
    ("options", "greedy", "adjusts", "plain"),
    [
        ({}, True, False, True),
        ({"temperature": 0.1}, False, False, False),
        ({"logprobs": 0}, True, False, False),
        ({"prompt_logprobs": 0}, True, False, True),
        ({"repetition_penalty": 1.1}, True, True, False),
        ({"repetition_penalty": 0.9}, True, True, False),
        ({"presence_penalty": -1}, True, True, False),
        ({"frequency_penalty": 1}, True, True, False),
        ({"logit_bias": {1: 0.0}}, True, True, False),
        ({"constraint": object()}, True, True, False),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.5}, True, False, True),  # nothing to filter
    ],
)
def test_what_changes_logits_and_what_is_plain(options, greedy, adjusts, plain):
    params = SamplingParams(**options)
    assert (params.greedy, params.adjusts, params.plain) == (greedy, adjusts, plain)


def test_values_are_copied_and_of_plain_types():
    bias, stop, ids = {np.int64(3): 1}, ["a"], [np.int32(7)]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids, top_k=np.int64(2))
    bias[4], stop[0], ids[0] = 1, "b", 9
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({3: 1.0}, ("a",), (7,))
    assert [type(x) for x in (*params.logit_bias.values(), params.top_k)] == [float, int]
    assert pickle.loads(pickle.dumps(params)) == params  # as ranks get it
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert (SamplingParams().max_tokens, SamplingParams().top_p) == (128, 1.0)
