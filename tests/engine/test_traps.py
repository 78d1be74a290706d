"""Known bugs of LLM engines, one test each that would have caught it.

The ones about scheduling; the state machines try all of it in random order besides.
"""

import pytest
from stub_engine import VOCAB, make_engine, solo

from labkit import config
from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams

CACHES = [kind.value for kind in config.PrefixCache]
OPTIMISTIC = {"reservation": config.Reservation.optimistic, "watermark": 0}
PROMPTS = {
    f"r{i}": tuple((3 * i + j * j) % VOCAB for j in range(n)) for i, n in enumerate((9, 4, 14, 1))
}


def submit(engine, prompts=PROMPTS, max_tokens=10):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, params))


def drain(engine, between=lambda step: None, bound=2000):
    """Step to the end; every request's tokens."""
    tokens, step = {}, 0
    while engine.has_work():
        step += 1
        assert step < bound, "livelock"
        between(step)
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
    return tokens


def expected(prompts=PROMPTS, max_tokens=10):
    return {name: solo(prompt, max_tokens) for name, prompt in prompts.items()}


def cached(kind, num_blocks, block_size=4):
    pool = BlockPool(num_blocks, block_size)
    return PagedKVCacheManager(pool, prefix_cache.create(kind, pool), block_bytes=100)


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
@pytest.mark.parametrize("at", range(1, 9))
def test_abort_in_flight_neither_frees_twice_nor_leaks(at, pipeline):
    engine, _ = make_engine(40, pipeline=pipeline, max_num_seqs=4, max_num_batched_tokens=8)
    submit(engine)
    early = []
    for _ in range(at):
        early += engine.step()
    engine.abort("r2")
    engine.abort("r2")
    tokens = {name: [] for name in PROMPTS}
    for event in early:
        tokens[event.request_id].append(event.token)
    for name, remaining in drain(engine).items():
        assert name != "r2", "an event after the abort"
        tokens[name] += remaining
    del tokens["r2"]
    assert tokens == {name: want for name, want in expected().items() if name != "r2"}
    counters = engine.counters()
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    engine.close()


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_preemption_meets_chunks_and_cached_prefixes(every, chunk, kind):
    engine, _ = make_engine(
        cache=cached(kind, 24), num_blocks=24, max_num_seqs=3, max_num_batched_tokens=8, chunk=chunk
    )
    submit(engine)
    names = list(PROMPTS)

    def force(step):
        if step <= 60 and step % every == 0:  # for ever, nobody could get on
            engine._scheduler.preempt(names[step // every % len(names)])

    assert drain(engine, force) == expected()
    assert engine.counters()["preemptions"] > 0


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_progress_is_kept_without_a_cache_in_a_small_pool(chunk, kind):
    """Progress is the request's, not the cache's: chunk after chunk, whatever is preempted."""
    engine, _ = make_engine(
        cache=cached(kind, 7),
        num_blocks=7,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        chunk=chunk,
        **OPTIMISTIC,
    )
    submit(engine)
    assert drain(engine) == expected()
    counters = engine.counters()
    assert counters["preemptions"] > 0
    needed = sum(map(len, PROMPTS.values())) + 9 * len(PROMPTS)
    assert counters["tokens.computed"] + counters["prefix.hit_tokens"] >= needed


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("composition", config.Composition)
def test_a_partial_chunk_is_never_sampled(composition, chunk, length):
    engine, _ = make_engine(
        40, max_num_seqs=2, max_num_batched_tokens=8, chunk=chunk, composition=composition
    )
    prompts = {"a": PROMPTS["r2"][:length]}
    submit(engine, prompts, max_tokens=1)
    steps = [len(engine.step()) for _ in range(-(-length // chunk))]
    assert steps == [0] * (len(steps) - 1) + [1]
    assert not engine.has_work()


@pytest.mark.parametrize("watermark", [0, 0.01])
@pytest.mark.parametrize("order", config.Order)
def test_preemption_does_not_thrash(order, watermark):
    """Everybody wants the last block: the first in line always gets on."""
    engine, _ = make_engine(
        8,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        order=order,
        reservation=config.Reservation.optimistic,
        watermark=watermark,
    )
    prompts = {f"r{i}": tuple((i + j) % VOCAB for j in range(12)) for i in range(8)}
    submit(engine, prompts, max_tokens=17)  # 28 slots: the whole pool
    assert drain(engine) == expected(prompts, 17)
    counters = engine.counters()
    assert counters["preemptions"] > 0
    needed = 28 * len(prompts)
    assert counters["tokens.computed"] < 3 * needed, "most of the work is done over and over"


def test_a_burst_of_urgent_requests_only_delays_the_others():
    engine, _ = make_engine(
        9, max_num_seqs=2, max_num_batched_tokens=8, queue="priority", **OPTIMISTIC
    )
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    prompts = {"low": PROMPTS["r2"]}
    engine.submit(Request("low", prompts["low"], params, priority=9))

    def burst(step):
        if step in (2, 5, 8, 11):
            name = f"urgent {step}"
            prompts[name] = PROMPTS["r0"]
            engine.submit(Request(name, prompts[name], params))

    tokens = drain(engine, burst)
    assert tokens == expected(prompts)
