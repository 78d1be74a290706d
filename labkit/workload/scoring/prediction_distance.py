"""How far an arm's predictions of the next token are from the baseline's, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.engine_protocol import PromptLogprobs

Floats = NDArray[np.float64]
MIN_REST = 1e-12  # the least probability of the rest: 1 minus a sum in float64 may be 0 or less


@dataclass(frozen=True, slots=True, eq=False)
class PredictionDistance:
    """The comparison of one window's n predicted positions."""

    logprobs: Floats  # the arm's log probability of each token: float64 [n]
    kl: Floats  # KL divergence of the arm's prediction from the baseline's in nats: float64 [n]
    same_top1: NDArray[np.bool_]  # whether both predict the same likeliest token: bool [n]
    # The arm's probability of the token minus the baseline's: float64 [n].
    probability_change: Floats


def prediction_distance(baseline: PromptLogprobs, arm: PromptLogprobs) -> PredictionDistance:
    """Compare an arm's log probabilities of a window with the baseline's.

    ``arm.scored`` holds the arm's log probabilities of the tokens ``baseline.top_ids``. It is empty
    for an arm that cannot score given tokens (a server). Then the tokens that are among the
    likeliest of both the arm and the baseline are compared one by one, and so are the baseline's
    that the arm must give less than the rest would leave them.
    """
    scores_ids = arm.scored.shape[1] > 0
    return PredictionDistance(
        arm.tokens,
        kl_divergence(baseline.top, arm.scored) if scores_ids else _least_kl(baseline, arm),
        baseline.top_ids[:, 0] == arm.top_ids[:, 0],
        np.exp(arm.tokens) - np.exp(baseline.tokens),
    )


def _least_kl(baseline: PromptLogprobs, arm: PromptLogprobs) -> Floats:
    """Return the least KL divergence per row that agrees with the likeliest tokens of both."""
    kl = np.empty(len(baseline.top))
    for row, (ids, arm_ids) in enumerate(zip(baseline.top_ids, arm.top_ids, strict=True)):
        _, ours, theirs = np.intersect1d(ids, arm_ids, assume_unique=True, return_indices=True)
        p, q, largest = baseline.top[row, ours], arm.top[row, theirs], arm.top[row, -1]
        others = np.delete(baseline.top[row], ours)  # the likeliest first
        count = _num_capped(p, q, others, largest)
        p = np.concatenate([p, others[:count]])
        q = np.concatenate([q, np.full(count, largest)])
        kl[row] = kl_divergence(p[None], q[None])[0]
    return kl


def _num_capped(p: Floats, q: Floats, others: Floats, largest: float) -> int:
    """Return how many of the tokens ``others`` have the probability ``largest`` at the least KL.

    The divergence is least where the arm shares what it gives the tokens outside ``q`` in the
    baseline's proportions. The likeliest of ``others`` would get more than ``largest`` so, and
    what they may not have goes to the rest. All are log probabilities.
    """
    shares, cap = np.exp(others), np.exp(largest)
    before = np.concatenate([[0.0], np.cumsum(shares)[:-1]])  # the sum of the likelier ones
    rest = np.maximum(1 - np.exp(p).sum() - before, MIN_REST)
    arm_rest = np.maximum(1 - np.exp(q).sum() - cap * np.arange(len(others)), MIN_REST)
    fits = shares * arm_rest <= cap * rest
    return int(np.argmax(fits)) if fits.any() else len(others)


def kl_divergence(baseline: Floats, arm: Floats) -> Floats:
    """Return KL(baseline || arm) per row, in nats, from log probabilities [n, k] of k tokens.

    All other tokens count as one token. The result is therefore a lower bound of the KL divergence
    over the whole vocabulary (the log sum inequality; Cover and Thomas, Elements of Information
    Theory, theorem 2.7.1). It equals that divergence if the arm scales the probabilities of all
    other tokens by the same factor.
    """
    p = np.exp(baseline)
    rest = np.maximum(1 - p.sum(axis=1), MIN_REST)
    arm_rest = np.maximum(1 - np.exp(arm).sum(axis=1), MIN_REST)
    whole = (p * (baseline - arm)).sum(axis=1) + rest * np.log(rest / arm_rest)
    result: Floats = np.maximum(whole, 0.0)
    return result
