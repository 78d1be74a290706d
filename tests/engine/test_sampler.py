import numpy as np
import pytest

from labkit.engine.base import InvalidLogitsError
from labkit.engine.request import Request, RequestState, SamplingParams
from labkit.engine.sampler import Sampler, draw, sample_row


def state(request_id, **params):
    return RequestState(Request(request_id, (1, 2, 3), SamplingParams(**params)))


def test_greedy_takes_the_best_and_reports_its_lead():
    logits = np.array([[0.0, 3.0, 2.5], [1.0, 1.0, -2.0]], np.float32)
    before = logits.copy()
    out = Sampler()(logits, [state("a"), state("b")])
    assert (out["a"].token, out["a"].margin) == (1, 0.5)
    assert (out["b"].token, out["b"].margin) == (0, 0.0)
    np.testing.assert_array_equal(logits, before)


def test_logits_that_are_not_numbers_name_their_request():
    logits = np.zeros((2, 5), np.float32)
    logits[1, 3] = np.nan
    with pytest.raises(InvalidLogitsError, match="request bad"):
        Sampler()(logits, [state("good"), state("bad")])


def test_a_draw_depends_on_seed_and_position_only():
    assert draw(7, 3) == draw(7, 3)
    assert len({draw(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_a_row_is_sampled_the_same_in_any_batch():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 50)).astype(np.float32)
    params = [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "top_k": 4, "seed": 6},
        {"temperature": 2.0, "top_p": 0.6, "seed": 7},
        {"temperature": 1.0},
        {"temperature": 1e-4, "seed": 8},
    ]
    states = [state(f"r{i}", **p) for i, p in enumerate(params)]
    together = Sampler()(logits.copy(), states)
    for i in reversed(range(6)):
        alone = Sampler()(logits[i : i + 1].copy(), [states[i]])
        assert alone[f"r{i}"] == together[f"r{i}"]


def sample_many(logits, count=4000, **params):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | params
    picks = [sample_row(logits, uniform=draw(1, i), **options) for i in range(count)]
    return np.bincount(picks, minlength=len(logits)) / count


def test_frequencies_match_the_softmax_at_a_temperature():
    logits = np.array([1.0, 0.0, 2.0, -1.0], np.float32)
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(logits / temperature)
        expected /= expected.sum()
        found = sample_many(logits, temperature=temperature)
        np.testing.assert_allclose(found, expected, atol=0.03)


def test_top_k_and_top_p_keep_the_likeliest():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    np.testing.assert_allclose(sample_many(logits, top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    # 0.4 + 0.3 reaches 0.6; the third would be beyond.
    np.testing.assert_allclose(sample_many(logits, top_p=0.6), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(sample_many(logits, top_p=0.39), [0, 1, 0, 0])
    np.testing.assert_allclose(sample_many(logits, top_k=1), [0, 1, 0, 0])


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_extreme_draws_stay_within_the_kept_tokens(uniform):
    logits = np.array([5.0, -200.0, 5.0], np.float32)
    for temperature in (1e-30, 1.0):
        assert sample_row(logits, temperature, 2, 1.0, uniform) in (0, 2)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"max_tokens": 0}],
)
def test_illegal_parameters_raise_at_construction(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)
