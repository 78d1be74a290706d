"""Speed of one checkout of labkit relative to another.

    python benchmarks/compare_checkouts.py OLD NEW path/to/an/mlx_lm/model [--pairs 16]

Two processes, one of each checkout, live at the same time and take turns in random order. In a turn
a process serves a batch of requests. Turns are short, so that a disturbance of a second or more
affects both processes. A pair of processes gives one number per case, the median of its ten ratios.
The table shows the mean over pairs, its 95 % interval and the range. Make a checkout with
``git worktree add``, for example. Each checkout compiles into its own cache beside the model's
folder.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Requests, prompt tokens, output tokens. Cases with one output token time the prefill.
CASES = {
    "prefill of 512": (1, 512, 1),
    "decode, 1 stream": (1, 32, 32),
    "decode, 16 streams": (16, 32, 12),
}
TURNS = 10  # turns of each checkout in a pair of processes
PARKED_S = 0.004  # twice as long as a thread of the pool spins


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=16, help="of processes")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.model)
        return 0
    ratios_by_case: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(options.pairs):
        for case, ratio in pair(options.old, options.new, options.model).items():
            ratios_by_case[case].append(ratio)
        print(f"pair {number + 1} of {options.pairs}", file=sys.stderr, flush=True)
    print("| case | speed of NEW / OLD: mean (95 %) | range |\n| --- | --- | --- |")
    for case, ratios in ratios_by_case.items():
        print(f"| {case} | {interval(ratios)} | {min(ratios):.2f} to {max(ratios):.2f} |")
    return 0


def pair(old: Path, new: Path, model: Path) -> dict[str, float]:
    """Run a pair of processes; return its median ratio of NEW's speed to OLD's, by case."""
    trees = {tree: start(tree, model) for tree in random.sample([old, new], 2)}
    ratios: dict[str, list[float]] = {case: [] for case in CASES}
    try:
        for process in trees.values():
            answer(process)  # the line that says it is ready
        for _ in range(TURNS):
            for case in CASES:
                seconds = {tree: ask(trees[tree], case) for tree in random.sample([old, new], 2)}
                ratios[case].append(seconds[old] / seconds[new])
    finally:
        for process in trees.values():
            process.kill()
            process.wait()
    return {case: statistics.median(values) for case, values in ratios.items()}


def start(tree: Path, model: Path) -> subprocess.Popen[str]:
    tree, model, script = tree.resolve(), model.resolve(), Path(__file__).resolve()
    cache = model.parent / f"cache-{tree.name}"
    return subprocess.Popen(
        [sys.executable, str(script), "--child", str(tree), str(tree), str(model)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "LABKIT_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: subprocess.Popen[str], case: str) -> float:
    """Let a process serve a case, and return the seconds that it measured."""
    assert process.stdin is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    seconds = float(answer(process))
    time.sleep(PARKED_S)
    return seconds


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended; its output is above")
    return line


def child(model: Path) -> None:
    """Load the model, warm up, and serve the cases named on standard input."""
    serve = server(model)
    for case in CASES:
        for _ in range(2):
            serve(case)
    print("ready", flush=True)
    for line in sys.stdin:
        print(serve(line.strip()), flush=True)


def server(model: Path) -> Callable[[str], float]:
    import numpy as np

    from labkit import config
    from labkit.cpu.runtime import thread_pool
    from labkit.engine import Request, SamplingParams, create
    from labkit.machine import openblas_for_mlx

    thread_pool.install()
    openblas_for_mlx.activate("openblas", 1)
    engine = create(config.Engine(name="paged", budget=config.Budget(blocks=512)), model)
    rng, served = np.random.default_rng(0), 0

    def serve(case: str) -> float:
        """Return the seconds of prefill if the case has one output token, else of decoding."""
        nonlocal served
        count, prompt, output = CASES[case]
        for _ in range(count):
            ids = tuple(rng.integers(5, 900, prompt).tolist())
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            engine.submit(Request(f"r{served}", ids, params))
            served += 1
        tokens, began, begun = 0, time.perf_counter(), None
        while engine.has_work():
            tokens += len(engine.step())
            if begun is None and tokens >= count:
                begun = time.perf_counter()
        assert begun is not None
        return begun - began if output == 1 else time.perf_counter() - begun

    return serve


def interval(ratios: list[float]) -> str:
    """Return the geometric mean and its 95 % interval (Student's t) as text."""
    import numpy as np
    from scipy import stats

    logs = np.log(ratios)
    if len(logs) < 2:
        return f"{np.exp(logs.mean()):.3f}"
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    low, high = np.exp([logs.mean() - half, logs.mean() + half])
    return f"{np.exp(logs.mean()):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
