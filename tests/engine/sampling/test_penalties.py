import numpy as np
import pytest

from labkit.engine.sampling.sampler import apply_params
from labkit.engine.sampling.sampling_params import SamplingParams

LOGITS = np.array([2.0, -2.0, 1.0, 0.5, -1.0], np.float32)
TOKENS = [0, 1, 0, 2, 2, 4]  # the first two are the prompt's


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logit_bias": {3: 5, 0: -1.5}}, [0.5, -2, 1, 5.5, -1]),
        # Prompt and output, each token once: divided above 0, multiplied below.
        ({"repetition_penalty": 2}, [1, -4, 0.5, 0.5, -2]),
        # The output only: token 1 stands in the prompt alone.
        ({"presence_penalty": 0.5}, [1.5, -2, 0.5, 0.5, -1.5]),
        ({"frequency_penalty": 0.5}, [1.5, -2, 0, 0.5, -1.5]),
        ({"presence_penalty": -1, "frequency_penalty": 1}, [2, -2, 0, 0.5, -1]),
        # Bias comes first: 2 - 4 is below 0, so repetition multiplies it.
        ({"logit_bias": {0: -4}, "repetition_penalty": 2}, [-4, -4, 0.5, 0.5, -2]),
        # Repetition comes before presence: 2 / 2 - 1.
        ({"repetition_penalty": 2, "presence_penalty": 1}, [0, -4, -0.5, 0.5, -3]),
    ],
)
def test_each_penalty_equals_hand_computed_logits(params, expected):
    before = LOGITS.copy()
    adjusted = apply_params(LOGITS, SamplingParams(**params), TOKENS, 2)
    np.testing.assert_array_equal(adjusted, np.array(expected, np.float32))
    assert adjusted.dtype == np.float32
    np.testing.assert_array_equal(LOGITS, before)


def test_without_generated_tokens_nothing_is_penalised():
    params = SamplingParams(presence_penalty=2, frequency_penalty=2)
    np.testing.assert_array_equal(apply_params(LOGITS, params, TOKENS[:2], 2), LOGITS)


def test_without_penalties_logits_are_not_copied():
    assert apply_params(LOGITS, SamplingParams(temperature=1, logprobs=3), TOKENS, 2) is LOGITS


def test_repetition_and_bias_agree_with_mlx_lm():
    import mlx.core as mx
    from mlx_lm.sample_utils import make_logits_processors

    rng = np.random.default_rng(0)
    logits = rng.standard_normal(40).astype(np.float32)
    tokens = rng.integers(0, 40, 15).tolist()
    bias = {3: 1.5, tokens[0]: -2.0}
    theirs = mx.array(logits)[None]
    for process in make_logits_processors(
        logit_bias=bias, repetition_penalty=1.3, repetition_context_size=15
    ):
        theirs = process(mx.array(tokens), theirs)
    ours = apply_params(logits, SamplingParams(logit_bias=bias, repetition_penalty=1.3), tokens, 5)
    np.testing.assert_allclose(ours, np.array(theirs)[0], rtol=1e-6)
