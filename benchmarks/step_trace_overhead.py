"""Cost of tracing (``workload.step_trace``): pairs of steps of two engines, one of them traced.

    python benchmarks/step_trace_overhead.py [--clocks] [--rounds 12] [--steps 800] [--requests 16]

With ``--clocks``, the second engine has clocks on the parts of its steps (docs/why.md) instead.

The engines have a stub in place of the model, so that a step is the host's work alone: schedule,
build, sample, update. Both decode the same requests. They take one step each in turn, in random
order, so that noise of the machine affects both alike. Each round creates new engines; its result
is the median difference of its pairs. The table shows the median, the smallest and the largest
result of the rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.request import Request
from labkit.engine.runner.decode_padding import DecodePadding
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.runner.step_clocks import ClockedEngine
from labkit.engine.runner.step_launchers import create_launcher
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.sampling.step_logits import Rows
from labkit.engine.scheduler.scheduler import Scheduler
from labkit.engine.speculation.propose_and_verify import Speculator
from labkit.engine.step_loop import NoScheduleCheck, StepLoop

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
VOCAB = 32


def run_model(batch: Batch) -> Rows:
    """Return logits from which token 0 is sampled in every row."""
    return np.zeros((len(batch.logit_rows), VOCAB), np.float32)


def decoding_engine(requests: int, steps: int) -> LLMEngine:
    """Return an engine whose requests have prefilled and decode for more than ``steps`` steps."""
    tokens, counters = PROMPT_TOKENS + steps + 32, Counters()
    pool = BlockPool(requests * (tokens // BLOCK_SIZE + 1) + 1, BLOCK_SIZE)
    cache = PagedKVCacheManager(pool)
    options = config.Scheduler(max_num_seqs=requests, max_num_batched_tokens=max(512, requests))
    scheduler = Scheduler(options, cache, frozenset())
    loop = StepLoop(
        config.Pipeline.sync,
        scheduler,
        InputBuilder(cache),
        DecodePadding(config.DecodeShape.exact, requests, counters),
        create_launcher(config.Pipeline.sync, run_model, counters),
        Speculator(),
        counters,
        NoScheduleCheck(),
    )
    engine = LLMEngine(
        scheduler=scheduler, cache=cache, loop=loop, counters=counters, vocab_size=VOCAB,
        max_context=None, notes={}, load_counters={}, name="paged",
    )  # fmt: skip
    params = SamplingParams(max_tokens=tokens - PROMPT_TOKENS, ignore_eos=True)
    for index in range(requests):
        engine.submit(Request(f"r{index}", (1,) * PROMPT_TOKENS, params))
    for _ in range(-(-requests * PROMPT_TOKENS // 512) + 2):
        engine.step()
    return engine


def timed_step(engine: Any) -> float:
    """Return the time of a step in us."""
    began = time.perf_counter()
    engine.step()
    return (time.perf_counter() - began) * 1e6


def run_round(requests: int, steps: int, order: random.Random, clocks: bool) -> tuple[float, float]:
    """Return the median time of a plain step, and the median extra time of a traced step (us)."""
    engines: list[Any] = [decoding_engine(requests, steps) for _ in range(2)]
    if clocks:
        timed = engines[1].time_steps(time.perf_counter)
        engines[1] = ClockedEngine(engines[1], timed, time.perf_counter)
    else:
        engines[1].trace_steps(steps, time.perf_counter)
    times = []
    for _ in range(steps):
        first = order.randrange(2)
        pair = {index: timed_step(engines[index]) for index in (first, 1 - first)}
        times.append((pair[0], pair[1]))
    return median(plain for plain, _ in times), median(traced - plain for plain, traced in times)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds of new engines")
    parser.add_argument("--steps", type=int, default=800, help="pairs of steps in a round")
    parser.add_argument("--requests", type=int, default=16, help="requests that decode together")
    parser.add_argument("--clocks", action="store_true", help="clocks in place of a trace")
    options = parser.parse_args()
    order = random.Random(0)
    sizes = options.requests, options.steps
    rounds = [run_round(*sizes, order, options.clocks) for _ in range(options.rounds)]
    plain, more = (sorted(column) for column in zip(*rounds, strict=True))
    print("| requests | time of a step (us) | extra time of a traced step (us) | extra (%) |")
    print("| --- | --- | --- | --- |")
    print(
        f"| {options.requests} | {median(plain):,.0f} | {median(more):.1f} "
        f"({more[0]:.1f} to {more[-1]:.1f}) | {100 * median(more) / median(plain):.1f} |"
    )


if __name__ == "__main__":
    main()
