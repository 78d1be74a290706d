"""Sampling of ``engine=mlx_lm``: a request's own random stream, greedy batches in one call."""

import dataclasses

import pytest
from mlx_lm_bench import prompts, requests, serve

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.mlx_lm.mlx_lm_sampling import make_request_sampler


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(shared):
    engine = shared()
    submitted = [
        Request(
            str(i),
            prompt,
            SamplingParams(
                temperature=0.5 + 0.2 * i,
                top_k=(0, 5, 1000)[i % 3],
                top_p=(1.0, 0.8)[i % 2],
                seed=None if i == 2 else 100 + i,
                max_tokens=10,
                ignore_eos=True,
            ),
        )
        for i, prompt in enumerate(prompts())
    ]
    together, last = serve(engine, submitted)
    assert all(event.margin is None for event in last.values())
    shuffled, _ = serve(engine, submitted[::-1])
    assert together == shuffled
    other = dataclasses.replace(
        submitted[3], params=dataclasses.replace(submitted[3].params, seed=1)
    )
    tokens, _ = serve(engine, [other])
    assert tokens["3"] != together["3"]


def test_greedy_requests_share_one_sampler_so_that_mlx_lm_samples_them_in_one_call():
    first, second, drawn = (
        make_request_sampler(Request(name, (1,), SamplingParams(temperature=t)))
        for name, t in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first is second is not drawn


def test_every_token_is_drawn_anew():
    import mlx.core as mx

    draw = make_request_sampler(Request("a", (1,), SamplingParams(temperature=1, seed=3)))
    assert len({draw(mx.zeros((1, 300))).item() for _ in range(10)}) > 5


def test_the_margin_is_the_greedy_tokens_lead(model_dir, shared):
    theirs, margins = shared(), []
    theirs.submit(requests()[1])
    while theirs.has_work():
        margins += [event.margin for event in theirs.step()]
    ours = create(config.Engine(budget=config.Budget(blocks=16)), model_dir("qwen3"))
    ours.submit(requests()[1])
    expected = []
    while ours.has_work():
        expected += [event.margin for event in ours.step()]
    ours.close()
    assert margins == pytest.approx(expected, abs=1e-4) and min(margins) > 0
