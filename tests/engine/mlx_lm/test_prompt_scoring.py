"""Log probabilities of prompts of ``engine=mlx_lm`` against one plain forward in float64."""

import numpy as np
import pytest
from scipy.special import log_softmax

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.models.synthetic.synthetic_model import build

SHAPE = config.ModelShape(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=128,
    vocab_size=512,
)
RNG = np.random.default_rng(0)
PROMPTS = {"a": 300, "b": 300, "c": 7}  # a and b are one batch, in several forwards


@pytest.fixture(scope="module")
def engine():
    engine = create(config.Engine(name="mlx_lm"), build(SHAPE, seed=0, name="scored"))
    yield engine
    engine.close()


def params(ids=None, top=3, max_tokens=1):
    return SamplingParams(
        prompt_logprobs=top, prompt_logprob_ids=ids, max_tokens=max_tokens, ignore_eos=True
    )


def events(engine):
    found = []
    while engine.has_work():
        found += engine.step()
    return {event.request_id: event for event in found}


def test_log_probabilities_are_those_of_one_plain_forward(engine):
    import mlx.core as mx

    prompts = {name: tuple(RNG.integers(0, 512, n).tolist()) for name, n in PROMPTS.items()}
    ids = {name: RNG.integers(0, 512, (n - 1, 5)).astype(np.int32) for name, n in PROMPTS.items()}
    engine.reset_counters()
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, params(ids[name])))
    scored = events(engine)
    for name, prompt in prompts.items():
        logits = np.array(engine._model.model(mx.array([prompt])))[0].astype(np.float64)
        expected, rows = log_softmax(logits, axis=1), np.arange(len(prompt) - 1)
        got = scored[name].prompt_logprobs
        np.testing.assert_allclose(got.tokens, expected[rows, prompt[1:]], atol=1e-4)
        np.testing.assert_allclose(
            got.scored, np.take_along_axis(expected[:-1], ids[name], 1), atol=1e-4
        )
        np.testing.assert_allclose(got.top, -np.sort(-expected[:-1], axis=1)[:, :3], atol=1e-4)
        assert scored[name].token == logits[-1].argmax()
        assert scored[name].finish_reason == "length"
    counters = engine.counters()
    assert counters["tokens.prefill"] == 607 and counters["steps.total"] == 2
    assert counters["tokens.output"] == 3
    assert counters["requests.finished"] == 3


def test_an_aborted_prompt_is_not_scored(engine):
    engine.submit(Request("a", (1, 2, 3), params()))
    engine.submit(Request("b", (1, 2, 3), params()))
    engine.abort("a")
    assert list(events(engine)) == ["b"]


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ((1, 2), {"max_tokens": 2}, "prompt_logprobs=3: engine=mlx_lm needs max_tokens=1"),
        ((1,), {}, "a prompt of one token has no log probabilities"),
    ],
)
def test_what_cannot_be_scored_is_one_line(prompt, options, reason, engine):
    engine.submit(Request("x", prompt, params(**options)))
    assert events(engine)["x"].error == f"request x: {reason}"
