import numpy as np
import pytest

from labkit.engine.sampling.sampler import candidates
from labkit.engine.sampling.sampling_params import SamplingParams


def candidates_of(logits, **params):
    return candidates(logits, SamplingParams(**{"temperature": 1.0} | params))


def frequencies(logits, count=4000, **params):
    chosen = candidates_of(logits, **params)
    picks = [chosen.pick(uniform) for uniform in np.random.default_rng(1).random(count)]
    return np.bincount(picks, minlength=len(logits)) / count


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # their squares
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        # 0.4 + 0.3 reaches 0.6; the third would be beyond.
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        # A share of what top-k left: 0.4 of 0.7 is below 0.6.
        ({"top_k": 2, "top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # At temperature 2 the ratio to the likeliest is its square root: 0.25 -> 0.5.
        ({"min_p": 0.49, "temperature": 2.0}, None),
    ],
)
def test_candidates_and_their_probabilities(params, expected):
    if expected is None:
        assert candidates_of(LOGITS, **params).ids.tolist() == [0, 1, 2, 3]
        assert candidates_of(LOGITS, **params | {"temperature": 1.0}).ids.tolist() == [1, 2, 3]
        return
    chosen = candidates_of(LOGITS, **params)
    likely = dict(zip(chosen.ids.tolist(), chosen.weights / chosen.weights.sum(), strict=True))
    probabilities = [likely.get(token, 0) for token in range(4)]
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    np.testing.assert_allclose(frequencies(LOGITS, **params), expected, atol=0.03)


def test_ties_are_broken_by_token_id():
    logits = np.array([1.0, 3.0, 3.0, 0.0, 3.0], np.float32)
    assert sorted(candidates_of(logits, top_k=2).ids.tolist()) == [1, 2]


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1.0])
@pytest.mark.parametrize("top_k", [0, 2, 3])
def test_extreme_draws_stay_within_the_likely_tokens(uniform, temperature, top_k):
    logits = np.array([5.0, 5.0, -2000.0, 5.0, -np.inf], np.float32)
    chosen = candidates_of(logits, temperature=temperature, top_k=top_k)
    assert chosen.pick(uniform) in (0, 1, 3)
    assert not {2, 4} & set(chosen.ids.tolist())


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}])
def test_a_last_bit_that_reorders_two_candidates_changes_no_draw(params):
    rng, changed = np.random.default_rng(0), 0
    for _ in range(200):
        logits = np.round(rng.normal(size=200), 1).astype(np.float32)  # many are equal
        ulps = rng.integers(-1, 2, len(logits)).astype(np.int32)
        moved = (logits.view(np.int32) + ulps).view(np.float32)
        one, other = (candidates_of(row, **params) for row in (logits, moved))
        if one.ids.tolist() == other.ids.tolist():  # no tie at the border of the set
            uniform = rng.random()
            changed += one.pick(uniform) != other.pick(uniform)
        assert (np.diff(one.ids) > 0).all()
    assert changed == 0
