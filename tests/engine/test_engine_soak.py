"""Thousands of requests in a small pool: none starves, and no block leaks."""

import gc

import numpy as np
import pytest
from stub_engine import VOCAB, make_engine, request, solo

from labkit import config
from labkit.engine.engine_protocol import NO_TOKEN
from labkit.engine.kv_cache_interface import BlockTable
from labkit.engine.request import RequestState

OPTIMISTIC = {"reservation": config.Reservation.optimistic, "chunk": 7}
SOAKS = {
    "full": {"chunk": 7},
    "optimistic": OPTIMISTIC,
    "priority": {**OPTIMISTIC, "queue": "priority", "watermark": 0},
    "split": {**OPTIMISTIC, "composition": config.Composition.split},
    "prefill_first": {**OPTIMISTIC, "order": config.Order.prefill_first, "watermark": 0},
    "static": {"admission": config.Admission.static, "order": config.Order.prefill_first},
    "hash": {**OPTIMISTIC, "prefixes": "hash", "watermark": 0},
    "radix": {**OPTIMISTIC, "prefixes": "radix", "watermark": 0},
}


def remains():
    """Count what engines keep of requests, apart from what was there before the test."""
    return sum(type(thing) in (RequestState, BlockTable) for thing in gc.get_objects())


def slots(new_request):
    """How many tokens of a request are computed."""
    return len(new_request.prompt_token_ids) + new_request.params.max_tokens - 1


@pytest.mark.parametrize(
    ("name", "count"),
    [("priority", 250), *(pytest.param(n, 2000, marks=pytest.mark.slow) for n in SOAKS)],
)
def test_soak_many_requests_in_a_pool_far_too_small(name, count, collect):
    """All finish with the tokens they would get alone, and nothing of them is left."""
    rng = np.random.default_rng(0)
    engine, _ = make_engine(12, max_num_seqs=6, max_num_batched_tokens=10, **SOAKS[name])
    requests, tokens, last, aborted = {}, {}, {}, set()
    trunk = rng.integers(0, VOCAB, 24).tolist()
    while len(requests) < count or engine.has_work():
        # The queue stays short, for every step's check looks through it.
        room = len(requests) < count and len(engine._scheduler._waiting) < 40
        for _ in range(int(rng.integers(0, 4)) if room else 0):
            prompt = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
            if rng.random() < 0.5:
                prompt[:-1] = trunk[: len(prompt) - 1]
            new = request(
                f"r{len(requests)}",
                prompt,
                int(rng.integers(1, 25)),
                bool(rng.integers(2)),
                int(rng.integers(3)),
            )
            requests[new.request_id] = new
            engine.submit(new)
        if rng.random() < 0.1 and requests:
            victim = f"r{rng.integers(max(0, len(requests) - 40), len(requests))}"
            if victim not in last:
                aborted.add(victim)
            engine.abort(victim)
        for event in engine.step():
            assert event.request_id not in aborted and event.request_id not in last
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason:
                last[event.request_id] = event
        engine.check()
    assert set(last) | aborted == set(requests) and len(aborted) > count // 100
    refused = {key for key, event in last.items() if event.finish_reason == "error"}
    large = {key for key, r in requests.items() if slots(r) > 11 * 4}
    assert refused == large - aborted
    for key in set(last) - refused:
        params = requests[key].params
        assert tokens[key] == solo(
            requests[key].prompt_token_ids, params.max_tokens, params.ignore_eos
        )
    engine.clear_cache()
    counters = engine.counters()
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    cached = "prefixes" in SOAKS[name]
    assert (counters["prefix.hit_tokens"] > 0) == (counters["prefix.evicted_blocks"] > 0) == cached
    assert counters["requests.refused"] == len(large) > 0
    assert (counters["preemptions"] > 0) == ("reservation" in SOAKS[name])
    collect()
    assert remains() < 20, "memory grows with requests"
