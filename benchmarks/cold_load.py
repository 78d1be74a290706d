"""First and second load of a model: seconds, CPU seconds and peak memory, in fresh processes.

    python benchmarks/cold_load.py MODEL [--rounds 3]

MODEL is a model directory or a GGUF file. Each round starts with an empty cache of numba's. *Cold*
compiles the kernels, *warm* loads them from the cache. CPU seconds and peak memory are those of
the process that loads the model, and of the processes that compile for it.
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

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "seconds", "CPU s", "CPU s, compilers", "peak MB", "peak MB, compilers"


def load(model: str) -> None:
    """Load a model, generate from a prompt of one token and a longer one, and print figures."""
    from labkit.engine.llm import LLM
    from labkit.engine.request import SamplingParams

    start = time.perf_counter()
    with LLM(model) as llm:
        seconds = time.perf_counter() - start
        llm.generate([[5], list(range(5, 105))], SamplingParams(max_tokens=4, ignore_eos=True))
    own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    cpu = [usage.ru_utime + usage.ru_stime for usage in (own, others)]
    print(json.dumps([seconds, *cpu, own.ru_maxrss / unit, others.ru_maxrss / unit]))


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
            environment = os.environ | {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
            for lines in results.values():
                command = [sys.executable, __file__, options.model, "--one"]
                out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
                lines.append(json.loads(out.stdout.splitlines()[-1]))
    print(" | ".join(("load", *COLUMNS)))
    for name, lines in results.items():
        print(" | ".join([name, *(f"{median(column):.1f}" for column in zip(*lines, strict=True))]))


if __name__ == "__main__":
    main()
