"""What a study of many cells costs: CPU time, memory and the size of its page, part by part.

    python benchmarks/large_studies.py [--cells 60,120] [--runs 50] [--parts plan,report,...]

``plan``: ``plan=true`` of one question with as many seeds as cells. ``report``: the first report of
planted cells (pages, tables and study.json, no pictures), each a copy of a committed one with
``--runs`` runs; 50 or a multiple fill its blocks. ``again``: the same report when nothing has
changed. ``moved``: the report of a copy in another place. ``compare``: the study with a copy of
itself. ``history``: of one metric. ``archive``: ``labkit.archive``, and ``archived``: the report of
that file.

Each figure is of a process of its own, of one thread: CPU seconds and peak memory, so another
program's load matters little. The ratio is the cost of a further cell relative to that in the
smallest studies.
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
from dataclasses import dataclass, replace
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
METRIC = "e2e_p50_ms"
PARTS = ("plan", "report", "again", "moved", "compare", "history", "archive", "archived")


@dataclass(frozen=True)
class Cost:
    """The CPU seconds and the peak memory of a process, and the size of the page that it wrote."""

    seconds: float
    memory_mb: float
    page_mb: float = 0.0


def cost(words: Sequence[str], folder: Path, page: str = "") -> Cost:
    """Return the cost of a Python process; ``page``: a file that it writes."""
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)[:80]}: failed")
    size = (folder / page).stat().st_size / 1e6 if page else 0.0
    return Cost(used.ru_utime + used.ru_stime, peak_mb(used), size)


def peak_mb(used: resource.struct_rusage) -> float:
    """Return the peak memory in MB; macOS counts bytes, Linux KiB."""
    return used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def costs(cells: int, runs: int, parts: Sequence[str], folder: Path) -> dict[str, Cost]:
    """Return what the parts cost in a study with so many cells."""
    seeds, found = ",".join(map(str, range(cells))), {}
    words = {
        "plan": ["-m", "labkit", "ablation=seq_map", f"seed={seeds}", "plan=true", "-m"],
        "report": ["-c", REPORT, "study"],
        "again": ["-c", REPORT, "study"],
        "moved": ["-c", REPORT, "moved/study"],
        "compare": ["-m", "labkit.compare", "study", "copy"],
        "history": ["-m", "labkit.history", "study", METRIC],
        "archive": ["-m", "labkit.archive", "study", "study.zip"],
        "archived": ["-c", REPORT, "study.zip"],
    }
    pages = {
        "report": "study/report.html",
        "again": "study/report.html",
        "moved": "moved/study/report.html",
        "history": f"study/history-{METRIC}.html",
        "archived": "study.report/report.html",
    }
    if set(parts) - {"plan"}:
        plant(folder / "study", cells, runs)
    if "compare" in parts:
        shutil.copytree(folder / "study", folder / "copy", copy_function=os.link)
    for part in parts:
        if part == "moved":
            shutil.copytree(folder / "study", folder / "moved" / "study", copy_function=shutil.copy)
        found[part] = cost(words[part], folder, pages.get(part, ""))
    return found


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


def lines(part: str, found: dict[int, Cost]) -> Iterator[str]:
    """Yield a table: cells, CPU seconds, peak memory, page, and the cost of a further cell."""
    yield f"{part:>8} of cells  CPU (s)  peak (MB)  page (MB)  ms a cell  ratio"
    (least, base), *_ = found.items()
    first = None
    for cells, one in found.items():
        each = (one.seconds - base.seconds) / (cells - least) if cells > least else None
        first = first or each
        share = "" if each is None or first is None else f"{1e3 * each:9.1f}  {each / first:5.2f}"
        numbers = f"{one.seconds:7.1f}  {one.memory_mb:9.0f}  {one.page_mb:9.2f}"
        yield f"{cells:17,}  {numbers}  {share}"


def main() -> int:
    """Measure the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="60,120")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(unknown)}: must be among {','.join(PARTS)}")
    found: dict[str, dict[int, Cost]] = {part: {} for part in parts}
    for cells in sorted(map(int, options.cells.split(","))):
        with tempfile.TemporaryDirectory() as folder:
            for part, one in costs(cells, options.runs, parts, Path(folder)).items():
                found[part][cells] = one
    for part, of_part in found.items():
        print("\n".join(lines(part, of_part)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
