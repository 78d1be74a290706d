"""First and second load of a model: seconds, CPU seconds and peak memory, in fresh processes.

    python benchmarks/cold_load.py MODEL [--rounds 3]

MODEL is a model directory or a GGUF file. Each round starts with an empty cache. *Cold* compiles
the kernels, *warm* loads them from the cache. CPU seconds and peak memory are those of the process
that loads the model and answers two prompts, and of the processes that compile for it. *Full*: then
16 streams fill 8,192 tokens of keys and values, of which the peak includes *KV*.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = (
    *("seconds", "CPU s", "CPU s, compilers", "peak MB", "peak MB, compilers"),
    *("peak MB, full", "KV MB"),
)
STREAMS, KV_TOKENS, BLOCK = 16, 8192, 16


def load(model: str) -> None:
    """Load a model, generate from a prompt of one token and a longer one, and print figures."""
    from labkit.engine.llm import LLM
    from labkit.engine.sampling.sampling_params import SamplingParams

    megabytes = 1e-6 if sys.platform == "darwin" else 1024e-6

    def usage() -> list[Any]:
        return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]

    def generate(prompts: list[list[int]], tokens: int) -> None:
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))

    start = time.perf_counter()
    with LLM(model, blocks=KV_TOKENS // BLOCK, max_num_seqs=STREAMS) as llm:
        seconds = time.perf_counter() - start
        generate([[5], list(range(5, 105))], 4)
        loaded = usage()
        length = KV_TOKENS // STREAMS - 2 * BLOCK
        generate([list(range(5 + i, 5 + i + length)) for i in range(STREAMS)], BLOCK)
        kv = llm.counters()["peak_kv_bytes"] / 1e6
    cpu = [used.ru_utime + used.ru_stime for used in loaded]
    peaks = [used.ru_maxrss * megabytes for used in [*loaded, usage()[0]]]
    print(json.dumps([seconds, *cpu, *peaks, kv]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        load(options.model)
        return
    results: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            folders = {"LABKIT_CACHE": cache, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
            environment = os.environ | folders
            for lines in results.values():
                command = [sys.executable, __file__, options.model, "--one"]
                out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
                lines.append(json.loads(out.stdout.splitlines()[-1]))
    print(" | ".join(("load", *COLUMNS)))
    for name, lines in results.items():
        print(" | ".join([name, *(f"{median(column):.1f}" for column in zip(*lines, strict=True))]))


if __name__ == "__main__":
    main()
