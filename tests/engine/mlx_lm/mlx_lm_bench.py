"""Requests for the mlx_lm engine on tiny models, and a loop that serves them."""

import numpy as np

from labkit import config
from labkit.engine import Request, SamplingParams
from labkit.engine.engine_protocol import NO_TOKEN

LENGTHS = (3, 8, 17, 40, 1, 33, 16, 15)
CAP = 3


def prompts(lengths=LENGTHS, seed=1):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, 298, n)) for n in lengths]


def options(chunk=None, cap=CAP):
    return config.Engine(
        name="mlx_lm",
        scheduler=config.Scheduler(max_num_seqs=cap, chunk=chunk),
    )


def requests(**params):
    chosen = SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | params)
    return [Request(str(i), p, chosen) for i, p in enumerate(prompts())]


def in_flight(engine):
    generator = engine._generator
    return sum(
        map(
            len,
            (
                generator._unprocessed_sequences,
                generator._prompt_batch.uids,
                generator._generation_batch.uids,
            ),
        )
    )


def serve(engine, submitted):
    tokens, last, most = {}, {}, 0
    for request in submitted:
        engine.submit(request)
    while engine.has_work():
        for event in engine.step():
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                assert event.request_id not in last
                last[event.request_id] = event
        most = max(most, in_flight(engine))
    assert most <= CAP
    return tokens, last
