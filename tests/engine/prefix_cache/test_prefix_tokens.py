"""With a prefix cache the tokens are those without one, computed by the real model."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create

CACHES = [config.PrefixCache.hash, config.PrefixCache.radix]


def options(cache, **changes):
    return config.Engine(
        **{
            "prefix_cache": cache,
            "scheduler": config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16),
            "kv": config.KV(block_size=8),
            "budget": config.Budget(blocks=64),
            **changes,
        }
    )


def conversation(seed=1):
    """Prompts that share a beginning and grow, as a client's turns do."""
    rng = np.random.default_rng(seed)

    def draw(count):
        return tuple(int(t) for t in rng.integers(0, 298, count))

    system, prompts = draw(37), []
    histories = [system] * 3
    for length in (5, 11, 3):
        for i in range(3):
            histories[i] += draw(length + i)
            prompts.append(histories[i])
    return prompts


def serve(engine, prompts, max_tokens=6):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, params))
    tokens = {}
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
    return tokens


@pytest.mark.parametrize("cache", CACHES)
def test_cold_and_warm_tokens_equal_plain_mlx_lm(cache, model_dir, plain_greedy):
    prompts = conversation()
    expected = {str(i): plain_greedy("qwen3", p, 6) for i, p in enumerate(prompts)}
    engine = create(options(cache), model_dir("qwen3"))
    assert serve(engine, prompts) == expected
    cold = engine.counters()
    assert 0 < cold["prefix.hit_tokens"] < cold["prefix.queried_tokens"]
    assert cold["prefix.queried_tokens"] == sum(map(len, prompts))
    assert cold["tokens.prefill"] == cold["prefix.queried_tokens"] - cold["prefix.hit_tokens"]
    engine.reset_counters()
    assert serve(engine, prompts) == expected
    warm = engine.counters()
    assert warm["prefix.hit_tokens"] == sum((len(p) - 1) // 8 * 8 for p in prompts)
    engine.clear_cache()
    engine.reset_counters()
    assert serve(engine, prompts) == expected
    assert engine.counters()["prefix.hit_tokens"] == cold["prefix.hit_tokens"]
