"""One arm runs out of memory: the outcome is oom, and the study continues to its end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from labkit import app
from labkit.records import read_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

ROOT = Path(__file__).parents[2]
CASE = '{name: "decode", decode: 64, context: 2048}'  # a pool of 268 MB
TIGHT = "+ablation.arms.tight={engine.memory_limit:67108864}"


@pytest.mark.parametrize("how", [pytest.param("cgroup", marks=pytest.mark.slow), "RLIMIT_AS"])
def test_an_arm_without_memory_is_oom_and_the_others_are_measured(
    how, tmp_path, monkeypatch, composer, capsys, pictures
):
    """The study runs in this process, and its workers in their own."""
    plain = "from labkit.machine.processes import process_memory_limit as m; m.CGROUP_VERSIONS = ()"
    # Workers import the module by themselves: without cgroups they limit address space.
    (tmp_path / "sitecustomize.py").write_text(plain if how == "RLIMIT_AS" else "")
    words = [
        "ablation=none",
        "workload=kernel_decode",
        f"workload.cases=[{CASE}]",
        TIGHT,
        "design=quick",
        "design.blocks=1",
        "design.control=false",
        f"out={tmp_path / 'out'}",
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr("labkit.experiment.hydra.hydra_composer.Composer", lambda: composer)
    monkeypatch.setattr(sys, "argv", ["labkit"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        app.main(words)
    assert left.value.code == 1, capsys.readouterr().err
    (cell,) = (tmp_path / "out").glob("*/cell.json")
    records = read_runs(cell.parent)
    assert len(records) == 2
    assert {r.outcome for r in records if r.arm == "base"} == {"ok"}
    assert {r.outcome for r in records if r.arm == "tight"} == {"oom"}
    cell_json = json.loads(cell.read_text())
    assert {failure["outcome"] for failure in cell_json["failures"]} == {"oom"}
    assert "oom" in (tmp_path / "out" / "report.md").read_text()
