"""KL divergence and agreement against plain calculations over the whole vocabulary."""

from dataclasses import replace

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


def server_s(logits, top):
    """Return what a server returns: its likeliest tokens and no others."""
    scored = score_rows(logits, TOKENS, top)
    return replace(scored, scored=np.empty((len(logits), 0)))


@pytest.mark.parametrize("noise", [0.3, 3.0])
@pytest.mark.parametrize("top", [1, 8, 20, 40])
def test_with_a_server_s_likeliest_tokens_it_is_the_least_that_agrees_with_them(top, noise):
    arm = BASE + noise * RNG.normal(size=BASE.shape).astype(np.float32)
    p, q = (np.exp(log_softmax(x.astype(np.float64), axis=1)) for x in (BASE, arm))
    baseline, server = score_rows(BASE, TOKENS, 40), server_s(arm, top)
    kl = prediction_distance(baseline, server).kl
    assert (kl <= entropy(p, q, axis=1) + 1e-6).all()
    for row in range(50):
        known = server.top_ids[row]
        others = np.setdiff1d(np.arange(40), known)
        cap, free = np.exp(server.top[row, -1]), 1 - np.exp(server.top[row]).sum()
        # The arm's probabilities that minimise the divergence: min(cap, factor * p), by bisection.
        low, high = 0.0, 1e9
        for _ in range(200 if len(others) else 0):
            factor = (low + high) / 2
            given = np.minimum(cap, factor * p[row, others]).sum()
            low, high = (factor, high) if given < free else (low, factor)
        closest = q[row].copy()
        closest[others] = np.minimum(cap, high * p[row, others])
        np.testing.assert_allclose(kl[row], entropy(p[row], closest), rtol=1e-4, atol=1e-6)


def test_a_constant_added_to_all_logits_changes_nothing():
    baseline = score_rows(BASE, TOKENS, 8)
    shifted = score_rows(BASE + np.float32(2), TOKENS, 1, baseline.top_ids)
    assert prediction_distance(baseline, shifted).kl.max() < 1e-6


def test_equal_predictions_have_the_distance_zero():
    logs = np.log(np.array([[0.5, 0.5], [1.0, 1e-30]]))
    assert kl_divergence(logs, logs).tolist() == [0.0, 0.0]
