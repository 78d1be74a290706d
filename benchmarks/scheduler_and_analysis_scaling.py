"""How the cost of a scheduler step and of the analysis of a study grow with their sizes.

    python benchmarks/scheduler_and_analysis_scaling.py [--parts engine,records] [--rounds 5]
        [--largest 1000000]

``engine``: the engine's scheduler, block pool, prefix cache and input builder, with a stub in place
of the model that samples token 1 at once. A step is the host's work: schedule, build the packed
arrays, update. The sizes of a table are interleaved in every round, so that noise of the machine
affects all alike. The figures are medians of rounds.

- blocks: 64 requests decode, in pools of 1,000 to 1,000,000 blocks; with the hash prefix cache
  the pool is full of evictable blocks, so every allocation first evicts a block.
- running: 16 to 1,024 requests decode together.
- context: 8 requests decode behind contexts of 1,000 to 100,000 tokens.
- waiting: 1,000 to 100,000 requests are submitted at once and served to the end, 256 at a time.

``records``: the time to analyse a study and write its report (no plots). The studies are copies of
the committed one of 30 runs: one cell of up to 1,000 runs, or several cells of 30 runs each.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import config
from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.request import Request
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
POOLS = (1_000, 10_000, 100_000, 1_000_000)
RUNNING = (16, 64, 256, 1_024)
WAITING = (1_000, 10_000, 100_000)
CONTEXTS = (1_000, 10_000, 100_000)
RUNS, CELLS = (30, 300, 990), (1, 10, 33)
REFERENCE = Path(__file__).resolve().parents[1] / "outputs" / "reference" / "seq_map.zip"
ROWS = 64  # running requests, for every size of the pool
STEPS = 48  # measured; a request fills three blocks meanwhile
MAX_FLAT_RATIO = 1.5  # a cost counts as flat up to this multiple of the smallest size's cost


class Host:
    """The parts of the engine that run on the host, with a stub in place of the model."""

    def __init__(self, num_blocks: int, rows: int, prefixes: str = "none") -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        cached_prefixes = prefix_cache.create(prefixes, self.pool)
        cache = PagedKVCacheManager(self.pool, cached_prefixes)
        self.step_tokens = max(rows, 8192)
        options = config.Scheduler(
            max_num_seqs=rows,
            max_num_batched_tokens=self.step_tokens,
            reservation=config.Reservation.optimistic,
        )
        self.scheduler = Scheduler(options, cache, frozenset())
        self.builder = InputBuilder(cache)
        self._num_submitted = 0

    def submit(self, count: int, prompt: int, max_tokens: int) -> None:
        """Submit ``count`` requests, no two of which share a prefix block."""
        for number in range(self._num_submitted, self._num_submitted + count):
            ids = (number, *[1] * (prompt - 1))
            self.scheduler.add(Request(f"r{number}", ids, SamplingParams(max_tokens=max_tokens)))
        self._num_submitted += count

    def step(self) -> None:
        """Run a step: schedule, build the arrays, sample token 1 for every row, update."""
        output = self.scheduler.schedule()
        batch = self.builder.build(output)
        answers = {state.request_id: [Sampled(1, None)] for state in batch.sampling}
        self.scheduler.update(output, answers)

    def timed(self, steps: int) -> float:
        """Return the mean time of a step (us), which includes work that only some steps do."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps * 1e6

    def drain(self) -> int:
        """Step until no request is live; return the number of steps."""
        steps = 0
        while self.scheduler.has_work():
            self.step()
            steps += 1
        return steps


def fill(host: Host) -> None:
    """Fill the pool with evictable blocks: the prefixes of finished requests."""
    while host.pool.num_free:
        host.submit(1, min(host.pool.num_free, 500) * BLOCK_SIZE, 1)
        host.drain()


def decoding(num_blocks: int, rows: int, prefixes: str = "none") -> Callable[[], float]:
    """Return a function that times steps (us) in which ``rows`` new requests decode."""
    host = Host(num_blocks, rows, prefixes)
    if prefixes != "none":
        fill(host)

    def turn() -> float:
        host.submit(rows, PROMPT_TOKENS, 2 * STEPS)
        for _ in range(-(-rows * PROMPT_TOKENS // host.step_tokens) + 1):  # prefill
            host.step()
        cost = host.timed(STEPS)
        host.drain()
        return cost

    return turn


def by_pool(prefixes: str, largest: int, rounds: int) -> dict[int, float]:
    """Return the cost of a step (us) by the number of blocks in the pool."""
    sizes = [size for size in POOLS if size <= largest]
    return in_turns({size: decoding(size, ROWS, prefixes) for size in sizes}, rounds)


def by_running(rounds: int) -> dict[int, float]:
    """Return the cost of a step (us) by the number of running requests."""
    return in_turns({rows: decoding(rows * 16 + 1, rows) for rows in RUNNING}, rounds)


def by_context(largest: int, rounds: int) -> dict[int, float]:
    """Return the cost of a decode step (us) by the context length of its requests."""

    def turn(tokens: int) -> Callable[[], float]:
        def steps() -> float:
            host = Host(8 * (tokens // BLOCK_SIZE + 8), 8)
            host.submit(8, tokens, 2 * STEPS)
            for _ in range(8 * tokens // host.step_tokens + 2):
                host.step()
            return host.timed(STEPS)

        return steps

    return in_turns({size: turn(size) for size in CONTEXTS if size <= largest}, rounds)


def by_waiting(largest: int, rounds: int) -> dict[int, float]:
    """Return the cost per request (us, submission to end) by the number of submitted requests."""

    def turn(count: int) -> Callable[[], float]:
        def served() -> float:
            host = Host(256 * 3 + 1, 256)
            start = time.perf_counter()
            host.submit(count, 32, 4)
            host.drain()
            return (time.perf_counter() - start) / count * 1e6

        return served

    return in_turns({count: turn(count) for count in WAITING if count <= largest}, rounds)


def analysed(cells: int, runs: int) -> float:
    """Return the seconds that the analysis of a study takes, from its files to its report."""
    from labkit.analysis import write_study

    with tempfile.TemporaryDirectory() as folder:
        for number in range(cells):
            copy_cell(Path(folder) / f"study/cell={number}", runs)
        start = time.perf_counter()
        write_study(Path(folder) / "study", plots=False)
        return time.perf_counter() - start


def copy_cell(target: Path, runs: int) -> None:
    """Write a copy of the committed cell with ``runs`` runs, by repeating its blocks."""
    from dataclasses import replace

    from labkit.records import read_cell, read_runs, unpack_archive, write_json, write_record

    unpacked = target.parent.parent / "source"
    if not unpacked.exists():
        unpack_archive(REFERENCE, unpacked)
    (source,) = (path.parent for path in unpacked.glob("*/cell.json"))
    shutil.copytree(source / "arms", target / "arms")
    (target / "runs").mkdir()
    records = read_runs(source)
    blocks = max(record.block for record in records) + 1
    for number in range(runs):
        record = records[number % len(records)]
        copy = replace(record, block=record.block + blocks * (number // len(records)))
        write_record(target / "runs" / f"{copy.run}.json", copy)
    facts = read_cell(source)
    design = {**facts["design"], "blocks": blocks * runs // len(records), "looks": [], "shown": []}
    write_json(target / "cell.json", {**facts, "cell": target.name, "design": design})


def in_turns(turns: dict[int, Callable[[], float]], rounds: int) -> dict[int, float]:
    """Call every size's function once per round; return each size's median result."""
    costs: dict[int, list[float]] = {size: [] for size in turns}
    for turn in turns.values():  # warm up
        turn()
    for _ in range(rounds):
        for size, turn in turns.items():
            costs[size].append(turn())
    return {size: median(values) for size, values in costs.items()}


def lines(title: str, costs: dict[int, float], unit: str) -> Iterator[str]:
    """Yield the lines of a table: size, cost, and cost relative to the smallest size's."""
    first = next(iter(costs.values()))
    yield f"{title:>22}  {unit:>14}  ratio"
    for size, cost in costs.items():
        yield f"{size:22,}  {cost:14.1f}  {cost / first:5.2f}"
    yield ""


def engine(largest: int, rounds: int) -> list[str]:
    """Measure and print the engine's tables; return a line for each cost that grows too fast."""
    gc.collect()
    gc.freeze()
    failed = []
    for prefixes in ("none", "hash"):
        costs = by_pool(prefixes, largest, rounds)
        print("\n".join(lines(f"blocks, prefixes={prefixes}", costs, "us a step")))
        if max(costs.values()) > MAX_FLAT_RATIO * costs[POOLS[0]]:
            failed.append(f"prefixes={prefixes}: a step's cost grows with the size of the pool")
    running = by_running(rounds)
    print("\n".join(lines("requests running", running, "us a step")))
    few, many = RUNNING[0], RUNNING[-1]
    if running[many] / many > MAX_FLAT_RATIO * running[few] / few:
        failed.append("a step's cost grows faster than the number of running requests")
    print("\n".join(lines("context", by_context(largest, min(rounds, 2)), "us a step")))
    waiting = by_waiting(largest, min(rounds, 2))
    print("\n".join(lines("requests submitted at once", waiting, "us a request")))
    if max(waiting.values()) > MAX_FLAT_RATIO * waiting[WAITING[0]]:
        failed.append("a request's cost grows with the number of waiting requests")
    return failed


def records() -> list[str]:
    """Measure and print the time of the analysis. It has no limits, so no line is returned."""
    analysed(1, RUNS[0])  # warm up
    costs = {runs: 1e3 * analysed(1, runs) for runs in RUNS}
    print("\n".join(lines("runs of one cell", costs, "ms a study")))
    costs = {cells: 1e3 * analysed(cells, RUNS[0]) for cells in CELLS}
    print("\n".join(lines("cells of 30 runs", costs, "ms a study")))
    return []


def main() -> int:
    """Measure and print the tables. Return 1 if a cost grows too fast, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="engine,records")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1_000_000)
    options = parser.parse_args()
    failed = []
    for part in options.parts.split(","):
        failed += records() if part == "records" else engine(options.largest, options.rounds)
    print(
        "\n".join(failed)
        or "costs are flat in blocks and waiting requests, and linear in running requests"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
