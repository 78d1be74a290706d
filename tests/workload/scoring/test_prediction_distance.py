"""KL divergence and agreement against plain calculations over the whole vocabulary."""

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import entropy

from labkit.engine.sampling.prompt_logprobs import score_rows
from labkit.workload.scoring.prediction_distance import kl_divergence, prediction_distance

RNG = np.random.default_rng(0)
BASE = RNG.normal(size=(50, 40)).astype(np.float32) * 3
ARM = BASE + 0.3 * RNG.normal(size=BASE.shape).astype(np.float32)
TOKENS = RNG.integers(0, 40, 50)


def compare(top):
    baseline = score_rows(BASE, TOKENS, top)
    return prediction_distance(baseline, score_rows(ARM, TOKENS, 1, baseline.top_ids))


def test_with_the_whole_vocabulary_it_is_the_kl_divergence():
    p, q = (np.exp(log_softmax(x.astype(np.float64), axis=1)) for x in (BASE, ARM))
    distance = compare(40)
    np.testing.assert_allclose(distance.kl, entropy(p, q, axis=1), atol=1e-6)
    rows = np.arange(50)
    np.testing.assert_allclose(distance.logprobs, np.log(q[rows, TOKENS]), atol=1e-6)
    np.testing.assert_allclose(
        distance.probability_change, q[rows, TOKENS] - p[rows, TOKENS], atol=1e-6
    )
    assert (distance.same_top1 == (p.argmax(1) == q.argmax(1))).all()
    assert 0 < distance.same_top1.sum() < 50


@pytest.mark.parametrize("top", [1, 8, 20])
def test_with_the_likeliest_tokens_it_is_that_of_the_partition_and_a_lower_bound(top):
    p, q = (np.exp(log_softmax(x.astype(np.float64), axis=1)) for x in (BASE, ARM))
    order = np.argsort(-p, axis=1)
    cells = [np.take_along_axis(x, order, 1) for x in (p, q)]
    parts = [np.column_stack([x[:, :top], x[:, top:].sum(axis=1)]) for x in cells]
    kl = compare(top).kl
    np.testing.assert_allclose(kl, entropy(*parts, axis=1), atol=1e-6)
    assert (kl <= entropy(p, q, axis=1) + 1e-6).all()


def test_a_constant_added_to_all_logits_changes_nothing():
    baseline = score_rows(BASE, TOKENS, 8)
    shifted = score_rows(BASE + np.float32(2), TOKENS, 1, baseline.top_ids)
    assert prediction_distance(baseline, shifted).kl.max() < 1e-6


def test_equal_predictions_have_the_distance_zero():
    logs = np.log(np.array([[0.5, 0.5], [1.0, 1e-30]]))
    assert kl_divergence(logs, logs).tolist() == [0.0, 0.0]
