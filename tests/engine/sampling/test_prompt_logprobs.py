"""Log probabilities of prompts equal those of plain mlx_lm on the whole text."""

import re

import numpy as np
import pytest
from test_kv_layouts import PRESETS, options, prompts

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import InvalidLogitsError
from labkit.engine.sampling.prompt_logprobs import score_rows

TOP = 4


@pytest.fixture(scope="module")
def plain_logprobs(model_dir):
    """A function: architecture, prompt -> mlx_lm's log probabilities [tokens, vocabulary]."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    models = {}

    def run(name, prompt):
        if name not in models:
            models[name] = load_model(model_dir(name))[0]
        logits = np.array(models[name](mx.array([prompt])), np.float64)[0]
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return run


@pytest.fixture
def scored(monkeypatch):
    """The number of prompt rows that each step has scored."""
    from labkit.engine.sampling.prompt_logprobs import score_step

    counts = []

    def count(logits, num_sampling, rows):
        counts.append(sum(part.num_rows for part in rows))
        return score_step(logits, num_sampling, rows)

    monkeypatch.setattr("labkit.engine.step_loop.score_step", count)
    return counts


def score(engine, texts, **params):
    """Submit the texts together, and return each request's prompt log probabilities."""
    params = {"prompt_logprobs": TOP, "max_tokens": 3, "ignore_eos": True} | params
    results = {}
    for i, text in enumerate(texts):
        engine.submit(Request(str(i), text, SamplingParams(**params)))
    while engine.has_work():
        for event in engine.step():
            assert event.error is None
            if event.prompt_logprobs is not None:
                assert event.request_id not in results
                results[event.request_id] = event.prompt_logprobs
        engine.check()
    return results


def check(results, texts, expected):
    for i, text in enumerate(texts):
        if len(text) == 1:
            assert str(i) not in results
            continue
        plain = expected(text)[:-1]
        got = results[str(i)]
        rows = np.arange(len(text) - 1)
        np.testing.assert_allclose(got.tokens, plain[rows, list(text[1:])], atol=1e-4)
        np.testing.assert_allclose(got.top, -np.sort(-plain, axis=1)[:, :TOP], atol=1e-4)
        np.testing.assert_allclose(got.top, plain[rows[:, None], got.top_ids], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "quantised"])
@pytest.mark.parametrize("preset", [*PRESETS, "paged"])
def test_every_layout_gives_mlx_lm_s_log_probabilities(name, preset, model_dir, plain_logprobs):
    if preset == "paged":
        engine_options = config.Engine(
            scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16),
            budget=config.Budget(blocks=64),
        )
    else:
        engine_options = options(preset)
    engine = create(engine_options, model_dir(name))
    check(score(engine, prompts()), prompts(), lambda text: plain_logprobs(name, text))


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": config.Pipeline.overlap},
        {"prefix_cache": config.PrefixCache.hash},
        {"prefix_cache": config.PrefixCache.radix},
        {"speculation": config.Speculation.ngram},
        {"decode_shape": config.DecodeShape.fixed},
        {"reservation": config.Reservation.optimistic, "blocks": 6},
    ],
    ids=str,
)
def test_no_other_part_changes_them(changes, model_dir, plain_logprobs):
    """Each text twice: the second time a prefix cache has its blocks."""
    scheduler = {"reservation": changes.pop("reservation")} if "reservation" in changes else {}
    engine_options = config.Engine(
        scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16, **scheduler),
        budget=config.Budget(blocks=changes.pop("blocks", 64)),
        **changes,
    )
    engine = create(engine_options, model_dir("qwen3"))
    for _ in range(2):
        results = score(engine, prompts(), max_tokens=24)
        check(results, prompts(), lambda text: plain_logprobs("qwen3", text))
    counters = engine.counters()
    assert counters.get("prefix.hit_tokens", 0) == 0
    assert counters.get("spec.drafted", 0) == 0
    if scheduler:
        assert counters["preemptions"] > 0


def test_a_prompt_without_the_option_still_hits_the_prefix_cache(model_dir):
    engine = create(
        config.Engine(prefix_cache=config.PrefixCache.hash, budget=config.Budget(blocks=64)),
        model_dir("qwen3"),
    )
    score(engine, prompts())
    assert score(engine, prompts(), prompt_logprobs=None) == {}
    assert engine.counters()["prefix.hit_tokens"] > 0


def test_ids_of_one_s_own_are_scored(model_dir, plain_logprobs):
    text = prompts()[3]
    ids = np.random.default_rng(0).integers(0, 300, (len(text) - 1, 5)).astype(np.int32)
    engine = create(options("gather"), model_dir("qwen3"))
    (got,) = score(engine, [text], prompt_logprob_ids=ids).values()
    plain = plain_logprobs("qwen3", text)
    np.testing.assert_allclose(got.scored, np.take_along_axis(plain[:-1], ids, 1), atol=1e-4)


def test_a_model_without_a_last_norm_of_its_own_scores_the_right_rows(
    model_dir, plain_logprobs, monkeypatch
):
    monkeypatch.setattr("labkit.engine.runner.packed_forward.select_rows", lambda model: None)
    engine = create(options("gather"), model_dir("qwen3"))
    check(score(engine, prompts()), prompts(), lambda text: plain_logprobs("qwen3", text))


def test_rows_scored_before_a_preemption_are_not_scored_again(model_dir, plain_logprobs, scored):
    text = prompts()[3]
    engine = create(options("gather"), model_dir("qwen3"))
    engine.submit(Request("0", text, SamplingParams(prompt_logprobs=TOP, max_tokens=1)))
    engine.step()
    engine._scheduler.preempt("0")
    events = []
    while engine.has_work():
        events += engine.step()
    check({"0": events[0].prompt_logprobs}, [text], lambda text: plain_logprobs("qwen3", text))
    assert sum(scored) == len(text) - 1


def test_a_step_scores_no_more_rows_than_the_limit(model_dir, plain_logprobs, scored, monkeypatch):
    monkeypatch.setattr("labkit.engine.scheduler.scheduler.MAX_SCORED_ROWS", 7)
    engine = create(options("gather", tokens=64), model_dir("qwen3"))
    check(score(engine, prompts()), prompts(), lambda text: plain_logprobs("qwen3", text))
    assert max(scored) == 7
    assert sum(scored) == sum(len(text) - 1 for text in prompts())


def test_equal_logits_are_ordered_by_id():
    got = score_rows(np.zeros((2, 9), np.float32), np.array([3, 4]), 3)
    assert got.top_ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(got.tokens, -np.log(9))


def test_a_nan_in_a_scored_row_is_an_error():
    logits = np.zeros((2, 9), np.float32)
    logits[1, 3] = np.nan
    with pytest.raises(InvalidLogitsError, match="not finite"):
        score_rows(logits, np.array([3, 4]), 0)


@pytest.mark.parametrize(
    "params",
    [
        {"prompt_logprobs": -1},
        {"prompt_logprob_ids": np.zeros((1, 1), np.int32)},
    ],
)
def test_invalid_parameters_are_one_line(params):
    with pytest.raises(ValueError, match="prompt_logprob"):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (np.zeros((2, 1), np.int32), r"has shape \[2, 1\].*: \[7, m\]"),
        (np.full((7, 1), 300, np.int32), "0 to 299"),
    ],
)
def test_ids_that_do_not_fit_the_prompt_are_refused(ids, reason, model_dir):
    engine = create(options("gather"), model_dir("qwen3"))
    params = SamplingParams(prompt_logprobs=0, prompt_logprob_ids=ids)
    engine.submit(Request("a", prompts()[1], params))
    (event,) = engine.step()
    assert re.search(reason, event.error)
