"""Variance of an engine's throughput between processes, beside that of the machine itself.

    python benchmarks/engine_and_machine_variance.py 20 outputs/mine

``ragged`` on model=small runs in fresh processes, one after the other. Before each of them, a
program without labkit runs in its own fresh process. It multiplies matrices with NumPy's BLAS and
reads memory, each with two threads and for as long as labkit is measured. Its variance is the
machine's. An interrupted benchmark resumes; ``--show`` prints the table of the results so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from labkit.experiment.cell import ReadyCell
    from labkit.experiment.permuted_blocks import Run
    from labkit.records import Record, StudyPath

SECONDS = 3.6  # per part: about as long as labkit is measured
OVERRIDES = [
    "workload=ragged", "model=small", "ablation=none", "design.control=false",
    "design.isolation=process", "design.runs_per_block=1", "design.looks=[]",
]  # fmt: skip
OURS = "labkit, ragged on model=small"
NAMES = {
    "product": "NumPy's matrix product, two threads",
    "reading": "reading 256 MB, two threads",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("processes", type=int, nargs="?", default=20)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--show", action="store_true", help="only print the table")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(machine()))
        return 0
    if options.out is None:
        parser.error("name the output folder after the number of processes")
    if options.processes < 2:
        parser.error(f"processes={options.processes}: variance needs at least 2 processes")
    if not options.show:
        measure(options.processes, options.out)
    print(table(options.out))
    return 0


def measure(processes: int, out: Path) -> None:
    """Run the missing processes: before each run of labkit, the machine's program."""
    from labkit import analysis, workload
    from labkit.cli import multirun_composition
    from labkit.experiment.compose.cell_composer import compose_cell, to_cell
    from labkit.experiment.launch.run_launcher import WorkerLauncher
    from labkit.experiment.schedule.cell_runner import run_cell

    class Between(WorkerLauncher):
        """A launcher that runs the machine's program before each run."""

        def launch(self, runs: Sequence[Run], cell: ReadyCell) -> list[Record]:
            command = [sys.executable, __file__, "--child"]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            records = super().launch(runs, cell)
            with open(out / "machine.jsonl", "ab") as file:
                file.write(done.stdout)
            return records

    multirun_composition.register()
    with multirun_composition.initialized():
        composed = compose_cell([], [*OVERRIDES, f"design.blocks={processes}"])
    workload.prepare(composed.experiment)
    run_cell(to_cell(composed, out), Between())
    analysis.write_cell(out)


def machine() -> dict[str, float]:
    """Return the matrix products and the memory reads per second of this machine."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((512, 512), dtype=np.float32)
    stream = np.ones(1 << 26, np.float32)
    halves = np.split(stream, 2)
    with ThreadPoolExecutor(2) as pool:
        return {
            "product": rate(lambda: a @ a),
            "reading": rate(lambda: list(pool.map(np.sum, halves))),
        }


def rate(work: Callable[[], object]) -> float:
    """Return the number of calls of ``work`` per second."""
    work()
    done, start = 0, time.perf_counter()
    while time.perf_counter() < start + SECONDS:
        work()
        done += 1
    return done / (time.perf_counter() - start)


def table(out: StudyPath) -> str:
    """Return a Markdown table: how each program's speed varies between processes."""
    paths: list[Any] = sorted((out / "runs").glob("b*.json"))
    records = [json.loads(path.read_text("utf-8")) for path in paths]
    if len(records) < 2:
        sys.exit(f"{out}: variance needs the runs of at least 2 processes, but has {len(records)}")
    lines = (out / "machine.jsonl").read_text("utf-8").splitlines()
    columns = {OURS: list(map(throughput, records))}
    for name, label in NAMES.items():
        columns[label] = [json.loads(line)[name] for line in lines[: len(records)]]
    rows = [
        "| measured (fresh processes) | 10th to 90th percentile | correlation with labkit |",
        "| --- | ---: | ---: |",
    ]
    for name, values in columns.items():
        low, high = np.percentile(values, [10, 90])
        like = statistics.correlation(values, columns[OURS]) if name != OURS else 1.0
        rows.append(f"| {name} ({len(values)}) | {100 * (high / low - 1):.1f} % | {like:+.2f} |")
    return "\n".join(rows)


def throughput(record: dict[str, Any]) -> float:
    """Return a record's tokens per second."""
    (case,) = record["cases"]
    (total,) = [metric for metric in case["metrics"] if metric["name"] == "total_tok_s"]
    return float(total["repeats"][0])


if __name__ == "__main__":
    sys.exit(main())
