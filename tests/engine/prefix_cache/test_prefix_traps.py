"""Bugs of other engines' prefix caches, one test each, on a stub model that reads KV slots.

The stub's answer is a function of what the slots of the whole context hold, and every
block that is free is overwritten before each step: whoever reads one gets other tokens.
"""

import numpy as np
import pytest
import stub_engine
from stub_engine import StubModel, make_cache, request, run, solo

from labkit import config
from labkit.engine.prefix_cache.hash_table import HashPrefixCache

BOTH = pytest.mark.parametrize("prefixes", ["hash", "radix"])
EVERY = pytest.mark.parametrize("prefixes", ["none", "hash", "radix"])
SIZE = 4


class PoisonedModel(StubModel):
    """Overwrites all free blocks before each step."""

    def __init__(self, cache):
        super().__init__(cache.pool.num_blocks, SIZE)
        self.pool = cache.pool
        self.spans = []

    def __call__(self, batch):
        self.slots[self.pool._free] = -1000
        self.spans.append((int(batch.positions[0]), int(batch.positions[-1]) + 1))
        return super().__call__(batch)


def make_engine(prefixes, num_blocks=40, **options):
    """An engine on the poisoned stub."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16} | options
    cache = make_cache(num_blocks, SIZE, prefixes)
    return stub_engine.make_engine(cache=cache, model=PoisonedModel(cache), **options)[0]


def prompts(seed=0, count=12):
    """Prompts that share beginnings of all lengths."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 30, 40).tolist()
    drawn = []
    for _ in range(count):
        own = rng.integers(0, 30, rng.integers(1, 12)).tolist()
        drawn.append(trunk[: rng.integers(0, 30)] + own)
    return drawn


def serve(engine, requested, max_tokens=7):
    requests = [request(f"r{i}", prompt, max_tokens) for i, prompt in enumerate(requested)]
    tokens, last = run(engine, requests)
    assert {event.finish_reason for event in last.values()} == {"length"}
    for i, prompt in enumerate(requested):
        assert tokens[f"r{i}"] == solo(prompt, max_tokens), f"request {i}"
    return engine.counters()


@BOTH
def test_trap_dedup_frees_live_pages(prefixes):
    """Identical prompts computed in the same steps: each has its own blocks until published."""
    engine = make_engine(prefixes, max_num_batched_tokens=64)
    prompt = list(range(1, 19))
    counters = serve(engine, [prompt] * 4)
    assert counters["tokens.prefill"] == 4 * 18, "all four were computed, side by side"
    assert counters["prefix.cached_blocks"] == (18 + 6) // SIZE
    assert counters["blocks.allocated"] - counters["blocks.freed"] == (18 + 6) // SIZE


@BOTH
@pytest.mark.parametrize("steps", range(1, 8))
def test_trap_publish_in_the_middle_of_a_prompt_then_abort(prefixes, steps):
    prompt = list(range(1, 24))
    engine = make_engine(prefixes, max_num_batched_tokens=6)
    engine.submit(request("gone", prompt, 5))
    for _ in range(steps):
        engine.step()
        engine.check()
    engine.abort("gone")
    counters = serve(engine, [prompt, prompt[:9], [*prompt[:10], 0, 0]])
    computed = min(6 * steps, 23 + max(0, steps - 4))
    assert counters["prefix.hit_tokens"] >= min(computed, 22) // SIZE * SIZE


@pytest.mark.parametrize("bits", [0, 2])
def test_trap_hash_collision(bits):
    engine = make_engine("hash")
    pool = engine._cache.pool
    weak = HashPrefixCache(pool, digest=lambda key: hash(key) % (1 << bits))
    engine._cache._prefix_cache = weak
    requested = prompts()
    serve(engine, requested)
    assert serve(engine, requested)["prefix.hit_tokens"] > 0
    assert len(weak._buckets) <= 1 << bits < len(weak._entries())


@BOTH
@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_trap_a_fully_cached_prompt(prefixes, length, max_tokens):
    prompt = list(range(1, length + 1))
    engine = make_engine(prefixes)
    serve(engine, [prompt], max_tokens)
    engine.reset_counters()
    counters = serve(engine, [prompt], max_tokens)
    assert counters["prefix.hit_tokens"] == (length - 1) // SIZE * SIZE
    assert counters["tokens.prefill"] == length - counters["prefix.hit_tokens"] >= 1


@EVERY
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_trap_preemption_chunks_and_cache_together(prefixes, every):
    """Preempted again and again, a request finds its own blocks and still ends."""
    engine = make_engine(
        prefixes,
        14,
        max_num_batched_tokens=7,
        chunk=5,
        reservation=config.Reservation.optimistic,
        watermark=0,
    )
    requested = prompts(3, 8)
    for i, prompt in enumerate(requested):
        engine.submit(request(f"r{i}", prompt, 9))
    tokens, steps = {}, 0
    while engine.has_work():
        if steps % every == 0:
            engine._scheduler.preempt(f"r{steps // every % len(requested)}")
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
        steps += 1
        assert steps < 2000, "preemption goes on for ever"
    assert tokens == {f"r{i}": solo(prompt, 9) for i, prompt in enumerate(requested)}
    counters = engine.counters()
    assert counters["preemptions"] > 0
    assert (counters["prefix.hit_tokens"] > 0) == (prefixes != "none")


@BOTH
def test_a_preempted_request_finds_its_own_blocks(prefixes):
    engine = make_engine(prefixes)
    engine.submit(request("a", range(1, 12), 9))
    for _ in range(4):
        engine.step()  # 11 prompt tokens and 3 outputs are computed
    engine.reset_counters()
    engine._scheduler.preempt("a")
    serve(engine, [])
    counters = engine.counters()
    assert counters["tokens.recomputed"] == (11 + 3) % SIZE
    assert counters["prefix.hit_tokens"] == 0  # which counts what requests have of others


@BOTH
def test_cached_tokens_of_a_request_are_those_at_its_first_admission(prefixes):
    engine, cached = make_engine(prefixes), []
    for name in "ab":
        engine.submit(request(name, range(1, 12), 9))
        events = [event for _ in range(4) for event in engine.step()]
        engine._scheduler.preempt(name)
        while engine.has_work():
            events += engine.step()
        cached.append({event.num_cached_tokens for event in events})
    assert cached == [{0}, {(11 - 1) // SIZE * SIZE}]


@BOTH
@pytest.mark.parametrize("seqs", [1, 4])
def test_trap_cold_and_warm_and_batch_size(prefixes, seqs):
    requested = prompts(2)
    shuffled = [requested[i] for i in np.random.default_rng(0).permutation(len(requested))]
    engine = make_engine(prefixes, 100, max_num_seqs=seqs)
    cold = serve(engine, requested)["prefix.hit_tokens"]
    engine.reset_counters()
    warm = serve(engine, shuffled)["prefix.hit_tokens"]
    assert warm == sum((len(p) - 1) // SIZE * SIZE for p in requested) > cold > 0
    engine.reset_counters()
    engine.clear_cache()
    assert serve(engine, requested)["prefix.hit_tokens"] == cold


@BOTH
def test_trap_eviction_under_pressure_keeps_reachable_blocks(prefixes):
    """``check`` walks the cache from its root after every step."""
    engine = make_engine(prefixes, 16, max_num_batched_tokens=9)
    for seed in range(5):
        counters = serve(engine, prompts(seed % 2))
    assert counters["prefix.evicted_blocks"] > 50
    assert counters["prefix.hit_tokens"] > 0
    assert counters["prefix.cached_blocks"] <= counters["blocks.total"]


@BOTH
@pytest.mark.parametrize("align", [1, 2])
def test_reuse_aligned_to_chunks_computes_the_same_chunks(prefixes, align):
    """Aligned, a warm prompt is computed in chunks of the cold one; else it may not be."""
    chunk = 2 * SIZE
    cache = make_cache(40, SIZE, prefixes)
    cache._reuse_blocks = align
    model = PoisonedModel(cache)
    engine, _ = stub_engine.make_engine(
        cache=cache, model=model, max_num_seqs=1, max_num_batched_tokens=16, chunk=chunk
    )
    prompt = list(range(1, 6 * SIZE))
    serve(engine, [prompt], 1)
    cold = list(model.spans)
    assert cold == [(0, 8), (8, 16), (16, 23)]
    serve(engine, [[*prompt[: 3 * SIZE], *prompt[: 2 * SIZE]]], 1)
    warm = model.spans[len(cold) :]
    assert warm == ([(12, 20)] if align == 1 else [(8, 16), (16, 20)])


@BOTH
def test_trap_a_step_in_flight_reads_blocks_freed_meanwhile(prefixes):
    """Aborts, preemptions and copies given back while the next step is running."""
    cache = make_cache(30, SIZE, prefixes)
    engine, _ = stub_engine.make_engine(
        cache=cache,
        model=StubModel(30, SIZE),
        pipeline="overlap",
        max_num_seqs=4,
        max_num_batched_tokens=12,
        reservation=config.Reservation.optimistic,
        watermark=0,
    )
    requested = prompts(4, 16) * 2
    for i, prompt in enumerate(requested):
        engine.submit(request(f"r{i}", prompt, 9))
    tokens, steps = {}, 0
    while engine.has_work():
        if steps % 7 == 3:
            engine.abort(f"r{steps // 7 % 8 * 4}")
        if steps % 5 == 2:
            engine._scheduler.preempt(f"r{steps % len(requested)}")
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
        steps += 1
    engine.close()
    whole = {key: output for key, output in tokens.items() if len(output) == 9}
    assert len(whole) >= 24
    for key, output in tokens.items():
        assert output == solo(requested[int(key[1:])], 9)[: len(output)]
    assert engine.counters()["prefix.hit_tokens"] > 0
