"""Studies whose arms take turns in processes of their own (``design.isolation=live``)."""

from __future__ import annotations

import sys

import pytest

from labkit import analysis
from labkit.config import Isolation
from labkit.experiment import StudyError
from labkit.experiment.compose.cell_composer import to_cells
from labkit.experiment.launch import turn_coordinator
from labkit.experiment.launch.run_launcher import WorkerLauncher
from labkit.experiment.schedule.cell_runner import run_cell, unfinished
from labkit.records import read_cell, read_runs, write_json

# ------------------------------------------------------------------ processes, stub workload


def test_every_arm_of_a_block_has_its_process_its_log_and_its_record(
    make_cell, launcher, monkeypatch
):
    """Of the second block only the baseline fails, so that it has no effect."""
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:kill:base:b01")
    cell = make_cell(isolation=Isolation.live, blocks=2)
    outcome = run_cell(cell, launcher)
    assert (outcome.ran, len(outcome.failed)) == (2 * 3, 1)
    records = read_runs(cell.dir)
    for block in (0, 1):
        runs = [record for record in records if record.block == block]
        names = [run.name for run in cell.schedule() if run.block == block]
        assert [record.run for record in runs] == names
        for record in runs:
            assert record.ok is (block == 0 or record.arm != "base")
            assert record.notes["isolation"] == "live"
            assert record.notes["together"] == names
            assert (cell.dir / "runs" / f"{record.run}.log").exists()
        assert len({record.seconds["process"] for record in runs}) == 1
    assert read_cell(cell.dir)["design"]["isolation"] == "live"
    (row,) = analysis.analyse_cell(cell.dir)["rows"]
    assert {name: arm["n"] for name, arm in row["arms"].items()}["base"] == 1
    assert {comparison["blocks"] for comparison in row["comparisons"]} == {1}
    (cell.dir / "cell.json").unlink()  # a lost manifest changes nothing
    assert analysis.analyse_cell(cell.dir)["design"]["isolation"] == "live"


@pytest.mark.parametrize(
    ("engine", "slice_s", "together"),
    [
        ({"pipeline": "overlap"}, turn_coordinator.SLICE_S, True),
        ({"name": "openai"}, turn_coordinator.LONG_SLICE_S, True),
        ({"budget": {"policy": "vllm"}}, turn_coordinator.SLICE_S, False),
    ],
)
def test_servers_have_longer_slices_and_pools_sized_by_free_memory_load_one_by_one(
    make_cell, launcher, replace, monkeypatch, engine, slice_s, together
):
    sets = []

    def run(commands, **options):
        sets.append((list(commands), options["slice_s"], options["load_together"]))
        raise StudyError("the set was started")

    monkeypatch.setattr(turn_coordinator, "run", run)
    monkeypatch.setattr(launcher, "prepare", lambda cell: None)  # nothing answers for the server
    cell = make_cell(isolation=Isolation.live)
    last = replace(cell.arms[-1], config={**cell.arms[-1].config, "engine": engine})
    cell = replace(cell, arms=(*cell.arms[:-1], last))
    with pytest.raises(StudyError, match="the set was started"):
        run_cell(cell, launcher)
    assert [len(arms) for arms, *_ in sets] == [3]
    assert [options for _, *options in sets] == [[slice_s, together]]


OUTCOMES = {
    "startup:kill": "crashed",
    "load:value": "refused",
    "measure:kill": "crashed",
    "measure:poison": "invalid_output",
    "measure:vacuous": "vacuous",
    "write:half": "invalid_output",
}


def test_a_failing_arm_fails_alone(make_cell, launcher, monkeypatch, replace):
    """One set, in which two arms do not fail and each of the others does in its own way."""
    cell = make_cell(isolation=Isolation.live)
    base, arm, control = cell.arms
    outcomes = {fault.replace(":", "_"): outcome for fault, outcome in OUTCOMES.items()}
    failing = (replace(arm, name=name) for name in outcomes)
    cell = replace(cell, arms=(base, *failing, control))
    faults = (f"{fault}:{fault.replace(':', '_')}" for fault in OUTCOMES)
    monkeypatch.setenv("LABKIT_TEST_FAULT", " ".join(faults))
    assert len(run_cell(cell, launcher).failed) == len(OUTCOMES)
    assert {record.arm: record.outcome for record in read_runs(cell.dir)} == {
        **outcomes, "base": "ok", "control": "ok",
    }  # fmt: skip
    gates = analysis.analyse_cell(cell.dir)["gates"]
    for gate, fault in {"healthy": "measure_kill", "engaged": "measure_vacuous"}.items():
        assert gates[gate]["status"] == "fail"
        assert any(f"-{fault}" in reason for reason in gates[gate]["reasons"])
    assert unfinished(cell, redo_failed=True) == cell.schedule()


def test_an_arm_whose_time_is_over_fails_alone(make_cell, launcher, time_over, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:hang:seq_map")
    cell = make_cell(isolation=Isolation.live)
    run_cell(cell, launcher)
    outcomes = {record.arm: record.outcome for record in read_runs(cell.dir)}
    assert outcomes == {"base": "ok", "control": "ok", "seq_map": "timeout"}


# ------------------------------------------------------------------ which studies are live


def test_a_study_of_separate_processes_continues_as_it_began(composed, tmp_path):
    overlap = composed("ablation=overlap", "design=standard")
    (cell, *_) = to_cells(overlap, tmp_path / "new")
    assert cell.design.isolation is Isolation.live
    for began in ("process", "live"):
        (tmp_path / began).mkdir()
        design = {"isolation": began, "blocks": 1}
        manifest = {"schema_version": 1, "arms": [], "design": design}
        write_json(tmp_path / began / "cell.json", manifest)
        (cell, *_) = to_cells(overlap, tmp_path / began)
        assert cell.design.isolation is Isolation(began)
    asked = composed("ablation=overlap", "design.isolation=live")
    assert to_cells(asked, tmp_path / "process")[0].design.isolation is Isolation.live


# ------------------------------------------------------------------ the real worker


@pytest.mark.parametrize("workload", ["kernels", "requests", "video"])
def test_arms_that_cannot_share_a_process_are_compared_round_by_round(
    user_cache, composed, make_cell, replace, tmp_path, monkeypatch, workload
):
    """``pipeline=overlap`` on requests, a BLAS of its own on kernels; the outputs agree.

    Video decoders could share a process.
    """
    words = {
        "requests": [
            "workload=uniform",
            "workload.num_requests=4",
            "ablation=overlap",
            "model=tiny",
        ],
        "kernels": [
            "ablation=seq_map",
            "+ablation.arms.other={engine.blas:stock}",
            "workload.repeats=3",
            "workload.max_pool_bytes=4000000",
            "model=tiny",
        ],
        "video": [
            "ablation=none",
            "workload=video",
            "+ablation.arms.seek={workload.picks:seek}",
            "workload.made=[{name:short,seconds:1.6,gop:10,width:64,height:64,events:0,requests:2}]",
            "workload.repeats=3",
            "workload.frames=4",
            "design.isolation=live",
        ],
    }[workload]
    whole = composed(*words, "design=quick", "design.control=false")
    assert whole.isolation is Isolation.live
    cell, *_ = to_cells(whole, tmp_path / "cell")
    monkeypatch.setenv("LABKIT_CACHE", str(user_cache))
    cell = replace(cell, design=replace(cell.design, blocks=1))
    run_cell(cell, WorkerLauncher((sys.executable, "-m", "labkit.experiment.worker")))
    records = read_runs(cell.dir)
    assert [(r.outcome, r.detail) for r in records] == [("ok", None)] * len(cell.arms)
    result = analysis.analyse_cell(cell.dir)
    assert result["gates"]["healthy"]["status"] == "pass"
    assert result["gates"]["identical"]["status"] in ("pass", "unclaimed")
    if workload == "video":
        clip, job = records[0].cases
        assert len(clip.notes["turns"]) == 3 and job.notes["job"]["requests"] == 2
