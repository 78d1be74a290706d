"""What a study of many cells costs: its plan, its report, and its history, per cell and in memory.

    python benchmarks/large_studies.py [--cells 1,10,100] [--runs 36] [--parts plan,report]

``plan``: ``plan=true`` of one question with as many seeds as cells, in a process of its own.
``report``: ``python -m labkit.report`` (its page, tables and study.json, no pictures) of planted
cells, each a copy of a committed one with ``--runs`` runs. The figures are CPU seconds and the peak
memory of the process, so another program's load matters little; the ratio is the cost of a cell
relative to that of the smallest study, without the process's start.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

REFERENCE = ROOT / "outputs" / "reference" / "latency_demo.zip"
REPORT = """
import sys
from pathlib import Path
from labkit.analysis.pages.report_files import write_study
write_study(Path(sys.argv[1]), plots=False)
"""


def cost(words: Sequence[str], folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a Python process and its peak memory (MB)."""
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)[:80]}: failed")
    return used.ru_utime + used.ru_stime, peak_mb(used)


def peak_mb(used: resource.struct_rusage) -> float:
    """Return the peak memory in MB; macOS counts bytes, Linux KiB."""
    return used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def plan(cells: int, folder: Path, runs: int) -> tuple[float, float]:
    """Return what the plan of a study with ``cells`` seeds costs."""
    seeds = ",".join(map(str, range(cells)))
    words = ["-m", "labkit", "ablation=seq_map", f"seed={seeds}", "plan=true", "-m"]
    return cost(words, folder)


def report(cells: int, folder: Path, runs: int) -> tuple[float, float]:
    """Return what the report of a study of planted cells costs."""
    plant(folder / "study", cells, runs)
    return cost(["-c", REPORT, str(folder / "study")], folder)


def plant(study: Path, cells: int, runs: int) -> None:
    """Write copies of a committed cell: the first with ``runs`` runs, the others linked to it."""
    from labkit.records import read_cell, read_runs, unpack_archive, write_json, write_record

    with tempfile.TemporaryDirectory() as folder:
        unpack_archive(REFERENCE, Path(folder) / "source")
        source = next((Path(folder) / "source").glob("*/cell.json")).parent
        records, facts = read_runs(source), read_cell(source)
        blocks = max(record.block for record in records) + 1
        design = {**facts["design"], "blocks": blocks * max(1, runs // len(records))}
        design |= {"looks": [], "shown": [], "looks_taken": []}
        for number in range(cells):
            target = study / f"seed={number}"
            (target / "runs").mkdir(parents=True)
            shutil.copytree(source / "arms", target / "arms")
            changed = {"cell": target.name, "overrides": [target.name], "design": design}
            write_json(target / "cell.json", {**facts, **changed})
            for index in range(runs):
                record = records[index % len(records)]
                again = replace(record, block=record.block + blocks * (index // len(records)))
                path = target / "runs" / f"{again.run}.json"
                if number:
                    path.hardlink_to(study / "seed=0" / "runs" / path.name)
                else:
                    write_record(path, again)


def lines(part: str, costs: dict[int, tuple[float, float]]) -> Iterator[str]:
    """Yield a table: cells, CPU seconds, peak memory, and the relative cost of a further cell."""
    yield f"{part:>8} of cells  CPU (s)  peak (MB)  ms a cell  ratio"
    (least, (base, _)), *_ = costs.items()
    first = None
    for cells, (seconds, memory) in costs.items():
        each = (seconds - base) / (cells - least) if cells > least else None
        first = first or each
        share = "" if each is None or first is None else f"{1e3 * each:9.1f}  {each / first:5.2f}"
        yield f"{cells:17,}  {seconds:7.1f}  {memory:9.0f}  {share}"


def main() -> int:
    """Measure the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="1,10,100")
    parser.add_argument("--runs", type=int, default=36)
    parser.add_argument("--parts", default="plan,report")
    options = parser.parse_args()
    sizes = sorted(map(int, options.cells.split(",")))
    for part in options.parts.split(","):
        costs = {}
        for cells in sizes:
            with tempfile.TemporaryDirectory() as folder:
                measure = {"plan": plan, "report": report}[part]
                costs[cells] = measure(cells, Path(folder), options.runs)
        print("\n".join(lines(part, costs)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
