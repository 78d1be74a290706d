"""A study of two small cells, and its tables without times."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from labkit.records import read_cell, read_runs

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = 6
STUDY = (
    "ablation=seq_map",
    "workload.cases=[{name: decode, decode: 4, context: 40}]",
    "design=quick",
    "workload.repeats=2",  # else the rounds, and so all counters, follow from the machine's noise
    f"design.blocks={BLOCKS}",
    "design.runs_per_block=1",
    "seed=1,2",
)


def command(*words):
    """The command of the study."""
    return [sys.executable, "-m", "labkit", *STUDY, *words, "-m"]


def own_environment(folder):
    """What makes a command run this checkout, and wait for no other's timing lock.

    No time is claimed here.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        "PYTHONPATH": path,
        "LABKIT_LOCK_DIR": str(folder / "locks"),
        "TMPDIR": str(folder / "tmp"),
    }


def cells(folder):
    """The folders of a study's cells."""
    return sorted(path.parent for path in folder.glob("*/cell.json"))


def tables(folder):
    """Everything that a study says, but for times and what follows from them."""
    return {cell.name: table(cell) for cell in cells(folder)}


def table(cell):
    manifest = read_cell(cell)
    rows = [
        [row[key] for key in ("case", "metric", "unit", "better", "primary", "skipped")]
        + [[comparison["arm"], comparison["blocks"]] for comparison in row["comparisons"]]
        for row in manifest["rows"]
    ]
    runs = [
        (r.run, r.outcome, [(c.case, c.outputs["digest"]) for c in r.cases])
        for r in read_runs(cell)
    ]
    kept = ("cell", "question", "arms", "design", "gates", "failures")
    return {**{key: manifest[key] for key in kept}, "rows": rows, "runs": runs}
