"""Whole tiny live studies of everything that cannot share a process: all gates hold.

``pytest -m slow -s`` prints a line of the table in ``docs/statistical-methods.md`` for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.records import read_runs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "model=tiny", "workload=uniform", "workload.num_requests=6", "workload.concurrency=2",
    "design=quick", "design.blocks=1", "design.runs_per_block=1",
)  # fmt: skip
OPENAI = ("engine=openai", "ablation.claims.identity=none")
OWN_ENGINE = """
import dataclasses

from labkit.engine.engine_factory import create


class Own:
    name = "own"

    def __init__(self, options, model_dir):
        self._engine = create(dataclasses.replace(options, name="paged"), model_dir)
        for method in ("submit", "abort", "has_work", "step", "reset_counters", "clear_cache"):
            setattr(self, method, getattr(self._engine, method))
        self.close = self._engine.close

    def counters(self):
        counts = self._engine.counters()
        return {**counts, "engine.Own": counts["steps.total"]}

    submit = abort = has_work = step = reset_counters = clear_cache = close = None
"""


def arm(**overrides: object) -> str:
    """Return the override that adds an arm beside the baseline; ``__`` stands for a point."""
    words = (f"{key.replace('__', '.')}:{value}" for key, value in overrides.items())
    return f"+ablation.arms.other={{{','.join(words)}}}"


STUDIES: dict[str, tuple[str, ...]] = {
    "mlx_lm beside paged": (arm(engine="mlx_lm"), "ablation.claims.identity=none"),
    "pipeline=overlap": (arm(engine__pipeline="overlap"),),
    "another BLAS": ("engine=mlx_lm", arm(engine__blas="stock"), "ablation.claims.identity=none"),
    "an MLX variable": (arm(engine__mlx__compile="false"),),
    "a memory limit": (arm(engine__memory_limit=2 << 30),),
    "threads of BLAS": ("engine=mlx_lm", arm(engine__threads=1), "ablation.claims.identity=none"),
    "an engine of one's own": (arm(engine__name="own_engine:Own"),),
    "a live budget": (
        "engine.budget.policy=fraction",
        "engine.budget.fraction=0.1",
        arm(engine__budget__fraction=0.2),
    ),
    "two ranks": (arm(engine__parallel__size=2),),
    "labkit's own server": (
        *OPENAI,
        "engine.server.preset=labkit",
        arm(engine__server__most_late_ms=60.0),
    ),
    "mlx_lm's server": (
        *OPENAI,
        "engine.server.preset=mlx_lm",
        arm(engine__server__most_late_ms=60.0),
    ),
    "the null server": (
        *OPENAI,
        "engine.server.preset=null_server",
        arm(engine__server__most_late_ms=60.0),
    ),
    "llama.cpp": (
        *OPENAI,
        "engine.server.preset=xllamacpp",
        arm(engine__server__most_late_ms=60.0),
    ),
    "a server beside an engine": (
        arm(engine="openai", engine__server__preset="labkit"),
        "ablation.claims.identity=none",
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_whole_live_study(name, tmp_path):
    if name == "llama.cpp" and importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    (tmp_path / "own_engine.py").write_text(OWN_ENGINE)
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "labkit", "ablation=none", *TINY, *STUDIES[name]),
            *(f"out={tmp_path / 'study'}", "-m"),
        ],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    (runs,) = (tmp_path / "study").glob("*/runs")
    records = read_runs(runs.parent)
    assert [(r.outcome, r.detail) for r in records] == [("ok", None)] * 3, done.stdout
    assert {record.notes["isolation"] for record in records} == {"live"}
    (row,) = [
        row
        for row in json.loads((runs.parent / "cell.json").read_text())["rows"]
        if row["primary"] and row["comparisons"]
    ]
    effects = {c["arm"]: c["effect_pct"] for c in row["comparisons"]}
    seconds = max(record.seconds["process"] * 3 for record in records)
    words = " | ".join(f"{effects[one]:+.1f} %" for one in ("other", "control"))
    print(f"\n| {name} | {row['metric']} | {words} | {seconds:.0f} s |")
    gates = re.search(r"gates: (.*?)\s*$", " ".join(done.stdout.split()))
    assert done.returncode == 0, (gates, done.stdout)
