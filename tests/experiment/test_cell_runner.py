"""The runner with real processes and a stub workload."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from planted_runs import Notes, PlantedRuns

from labkit.config import ConfigError, Isolation
from labkit.experiment import Interrupted, StudyError
from labkit.experiment.launch import child_process, failed_run_records
from labkit.experiment.launch.run_launcher import WorkerLauncher
from labkit.experiment.progress_display import Progress
from labkit.experiment.schedule import cell_runner
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.cell_runner import run_cell, unfinished
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.experiment.schedule.timing_lock import timing_lock
from labkit.machine.facts import code_revision, machine_snapshot
from labkit.records import (
    DIGESTS_FILE,
    describe_last_session,
    read_arms,
    read_cell,
    read_record,
    read_runs,
    unlisted_records,
    write_json,
    write_record,
)


def test_a_cell_writes_all_its_files_and_grows(make_cell, launcher, monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setattr(code_revision, "uncommitted_changes", lambda: "0123456789abcdef")
    cell = make_cell()
    outcome = run_cell(cell, launcher)
    assert (outcome.ran, outcome.already_done, outcome.failed) == (3, 0, ())
    records = read_runs(cell.dir)
    assert [r.run for r in records] == [run.name for run in cell.schedule()]
    assert [arm.name for arm in read_arms(cell.dir)] == ["base", "seq_map", "control"]
    assert read_cell(cell.dir)["design"]["seed"] == 7
    assert not any((cell.dir / "runs" / "pending").iterdir())
    for record in records:
        assert record.seed == 7
        assert record.cases[0].metrics[0].repeats == (107.0, 101.0, 102.0)
        assert record.seconds["startup"] > 0
        assert record.seconds["total"] <= record.seconds["process"]
        assert record.notes["workload"] == "stub"
        assert record.notes["observer"]["cpu_s"] >= 0
        assert "OPENBLAS_CORETYPE" in record.notes["removed_environment"]
        assert record.environment["cores"] >= 1
        assert record.environment["git_changes"] == "0123456789abcdef"
    assert "predecessor" not in records[0].notes
    assert [r.notes["predecessor"] for r in records[1:]] == [r.arm for r in records[:-1]]
    assert all(0 <= r.notes["gap_s"] < 60 for r in records[1:])
    config = {r.arm: r.notes["config"] for r in records}
    assert config["base"] == config["control"] != config["seq_map"]
    assert run_cell(make_cell(), launcher).ran == 0
    assert unfinished(make_cell()) == []
    outcome = run_cell(make_cell(blocks=2), launcher)
    assert (outcome.ran, outcome.already_done) == (3, 3)
    after = {r.run: r for r in read_runs(cell.dir)}
    assert all(after[record.run] == record for record in records)
    assert read_cell(cell.dir)["design"]["blocks"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "seed was 7, now 8"),
        ({"runs_per_block": 2}, "design.runs_per_block was 1, now 2"),
        ({"alpha": 0.01}, "design.alpha was 0.05, now 0.01"),
        ({"blocks": 1}, "design.blocks was 2, now 1"),
    ],
)
def test_another_design_is_refused(make_cell, launcher, change, message):
    write_manifest(make_cell(blocks=2), 2)
    cell = make_cell(**{"blocks": 2, **change})
    with pytest.raises(ConfigError, match=message):
        refuse_changes(cell)
    with pytest.raises(ConfigError, match=message):
        run_cell(cell, launcher)


def test_another_metric_is_refused_and_a_study_without_one_stays_so(make_cell, replace):
    cell = replace(make_cell(), metrics=("total_tok_s",))
    write_manifest(cell, 1)
    message = r"ablation.metric was \['total_tok_s'\], now \['e2e_p50_ms'\]"
    with pytest.raises(ConfigError, match=message):
        refuse_changes(replace(cell, metrics=("e2e_p50_ms",)))
    manifest = read_cell(cell.dir)
    del manifest["design"]["metrics"]  # as an older version wrote it
    write_json(cell.dir / "cell.json", manifest)
    for name in ("design.json", DIGESTS_FILE):
        (cell.dir / name).unlink()
    grown = replace(cell, metrics=("e2e_p50_ms",), design=replace(cell.design, blocks=2))
    refuse_changes(grown)
    write_manifest(grown, 2)
    design = read_cell(cell.dir)["design"]
    assert design["blocks"] == 2 and "metrics" not in design


def test_another_arm_is_refused_with_the_difference(make_cell, replace):
    cell = make_cell()
    write_manifest(cell, 1)
    arm = json.loads(json.dumps(cell.arms[1].to_json()))
    arm["config"]["engine"]["attention"]["resolver"] = "identity"
    other = replace(cell.arms[1], config=arm["config"])
    changed = replace(cell, arms=(cell.arms[0], other, cell.arms[2]))
    message = "arm seq_map: config.engine.attention.resolver was seq_map, now identity"
    with pytest.raises(ConfigError, match=message):
        refuse_changes(changed)
    with pytest.raises(ConfigError, match="arm seq_map was removed"):
        refuse_changes(replace(cell, arms=(cell.arms[0], cell.arms[2])))


def test_a_fresh_folder_is_not_refused(make_cell):
    refuse_changes(make_cell())
    assert not make_cell().dir.exists()


def test_an_unfinished_block_is_abandoned_and_runs_again(make_cell):
    cell, runs = make_cell(blocks=2), PlantedRuns()
    run_cell(cell, runs)
    lost = cell.schedule()[4]
    (cell.dir / "runs" / f"{lost.name}.json").unlink()
    kept = {p.name: p.read_bytes() for p in (cell.dir / "runs").glob("b00*.json")}
    assert len(unfinished(cell)) == 3
    assert run_cell(cell, runs).ran == 3
    assert len(list((cell.dir / "runs" / "abandoned").glob("b01*.json"))) == 2
    assert {p.name: p.read_bytes() for p in (cell.dir / "runs").glob("b00*.json")} == kept
    (cell.dir / "runs" / f"{lost.name}.json").unlink()
    run_cell(cell, runs)
    assert len(list((cell.dir / "runs" / "abandoned").glob("b01*.json"))) == 4


def of_block(cell, block):
    return [run for run in cell.schedule() if run.block == block]


def other_run(text):
    return text.replace('"position": 1', '"position": 7').replace("b01-p01", "b01-p07")


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not a record": lambda text: "{}",
    "another version": lambda text: text.replace('"schema_version": 1', '"schema_version": 2'),
    "another run": other_run,
    "not finite": lambda text: text.replace('"number": ', '"number": NaN, "n": '),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_block_with_a_broken_record_runs_again(make_cell, damage):
    """A broken record is no result: it must neither count as done nor be lost."""
    cell, runs = make_cell(blocks=3), PlantedRuns()
    run_cell(cell, runs)
    broken = cell.paths.record(of_block(cell, 1)[1])
    text = DAMAGE[damage](broken.read_text())
    assert text != broken.read_text()
    broken.write_text(text)
    assert unfinished(cell) == of_block(cell, 1)
    outcome = run_cell(cell, runs)
    assert (outcome.ran, outcome.already_done) == (3, 6)
    assert runs.launched[9:] == [run.name for run in of_block(cell, 1)]
    assert (cell.paths.abandoned / broken.name).read_text() == text
    assert [r.notes["number"] for r in read_runs(cell.dir)] == [1, 2, 3, 10, 11, 12, 7, 8, 9]


def test_records_of_a_dead_worker_are_not_published(make_cell):
    """Its parent died and did not check how it ended: the block runs again, whatever it wrote."""
    cell, runs = make_cell(blocks=2), PlantedRuns()
    run_cell(make_cell(blocks=1), runs)
    dead = [replace(runs.record(run, cell), notes={"dead": True}) for run in of_block(cell, 1)]
    for record in dead:
        write_record(cell.paths.pending / f"{record.run}.json", record)
    halves = (cell.paths.pending, "9f00ab1c"), (cell.paths.runs, "0ab19f0c"), (cell.paths.runs, 18)
    for folder, number in halves:  # a number: of an earlier version
        (folder / f".b01-p00-base.json.{number}.tmp").write_text("{")
    assert unfinished(cell) == of_block(cell, 1)
    assert run_cell(cell, runs).ran == 3
    assert not any("dead" in record.notes for record in read_runs(cell.dir))
    assert len(list(cell.paths.abandoned.iterdir())) == 6
    for record in dead:
        assert read_record(cell.paths.abandoned / f"{record.run}.json") == record


def test_the_record_of_a_worker_that_was_killed_for_its_time_is_not_published(make_cell):
    cell = make_cell()
    run = cell.schedule()[0]
    cell.paths.pending.mkdir(parents=True)
    write_record(cell.paths.pending_record(run), PlantedRuns().record(run, cell))
    ending = child_process.ProcessExit(-signal.SIGKILL, timed_out=True, oom_kills=0, wall_s=60.0)
    failure = failed_run_records._collect(run, cell, ending, cell.paths.log(run))
    assert (failure.outcome, failure.detail) == ("timeout", "killed after 60 s: its log is empty")
    ended = replace(ending, code=0, timed_out=False)
    assert failed_run_records._collect(run, cell, ended, cell.paths.log(run)).run == run.name


class FailedRuns(PlantedRuns):
    def fields(self, run, cell):
        return {"outcome": "crashed", "detail": "planted"} if run.arm == "seq_map" else {}


def test_redo_runs_failed_blocks_again(make_cell):
    cell = make_cell(blocks=2)
    assert len(run_cell(cell, FailedRuns()).failed) == 2
    assert len(run_cell(cell, PlantedRuns()).failed) == 2
    again = run_cell(cell, PlantedRuns(), redo_failed=True)
    assert (again.ran, again.failed) == (6, ())
    assert len(list((cell.dir / "runs" / "abandoned").glob("*.json"))) == 6


@pytest.mark.parametrize(
    ("claimed", "outcome", "again"),
    [("seq_map", "oom", 0), ("control", "oom", 6), ("seq_map", "crashed", 6)],
)
def test_redo_leaves_runs_that_ran_out_of_memory_as_claimed(make_cell, claimed, outcome, again):
    cell, runs = make_cell(blocks=2), SomeFailedRuns(lambda _: True, outcome=outcome)
    arms = (replace(arm, out_of_memory=arm.name == claimed) for arm in cell.arms)
    cell = replace(cell, arms=tuple(arms))
    run_cell(cell, runs)
    assert len(unfinished(cell, redo_failed=True)) == again
    assert run_cell(cell, runs, redo_failed=True).ran == again


class SomeFailedRuns(PlantedRuns):
    """Those of seq_map fail if ``fails`` says so, given the number of the block."""

    def __init__(self, fails, **fields):
        super().__init__()
        self.fails, self.failed = fails, {"outcome": "crashed", "detail": "planted"} | fields

    def fields(self, run, cell):
        return self.failed if run.arm == "seq_map" and self.fails(run.block) else {}


@pytest.mark.parametrize("isolation", ["process", "in_process"])
def test_an_arm_whose_first_runs_all_failed_is_not_run_any_more(make_cell, isolation):
    cell, runs = make_cell(blocks=5, isolation=Isolation(isolation)), SomeFailedRuns(lambda _: True)
    assert len(run_cell(cell, runs).failed) == 5
    started = [name for name in runs.launched if name.endswith("seq_map")]
    assert len(started) == 3 and len(runs.launched) == 13
    records = [record for record in read_runs(cell.dir) if record.arm == "seq_map"]
    assert [(record.block, record.outcome) for record in records] == [
        (b, "crashed") for b in range(5)
    ]
    reason = f"not run, as the first 3 runs failed ({started[0]}: planted)"
    assert [record.detail for record in records] == ["planted"] * 3 + [reason] * 2
    again = SomeFailedRuns(lambda _: False)
    assert run_cell(cell, again, redo_failed=True).failed == () and len(again.launched) == 15


def test_a_run_that_is_not_started_names_the_log_of_the_run_that_failed(make_cell):
    class Logged(FailedRuns):
        """seq_map is prepared without a failure, which leaves a log."""

        def prepare(self, cell):
            (cell.paths.runs / "prepare-seq_map.log").touch()

        def fields(self, run, cell):
            return super().fields(run, cell) | {"notes": {"log": f"runs/{run.name}.log"}}

    cell = make_cell(blocks=4)
    run_cell(cell, Logged())
    failed = [record for record in read_runs(cell.dir) if record.arm == "seq_map"]
    assert failed[3].detail.startswith(f"not run, as the first 3 runs failed ({failed[0].run}: ")
    assert failed[3].notes["log"] == f"runs/{failed[0].run}.log"


@pytest.mark.parametrize(
    ("fails", "fields"),
    [
        (lambda block: block != 1, {}),
        (lambda block: True, {"notes": {"failed_by": "b00-p00-base"}}),
    ],
)
def test_an_arm_is_run_on_if_a_run_succeeded_or_another_arm_ended_them(make_cell, fails, fields):
    runs = SomeFailedRuns(fails, **fields)
    run_cell(make_cell(blocks=5), runs)
    assert len(runs.launched) == 15


def test_a_compilation_inside_a_measurement_is_reported(make_cell, launcher, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:compile:seq_map")
    progress, cell = Notes(), make_cell(control=False)
    run_cell(cell, launcher, progress)
    message = [line for line in progress.lines if "compiled while measuring" in line]
    (name,) = [run.name for run in cell.schedule() if run.arm == "seq_map"]
    assert message == [f"{name}: 2 kernels were compiled while measuring"]


class HostRuns(PlantedRuns):
    def fields(self, run, cell):
        return {"environment": {"host": machine_snapshot.host_hash()}}


def test_a_cell_continues_on_another_host_only_with_across_hosts(make_cell, monkeypatch):
    """As after a requeue to another node; the lost block runs again there from its start."""
    runs = HostRuns()
    run_cell(make_cell(blocks=1), runs)
    here = machine_snapshot.host_hash()
    monkeypatch.setattr(machine_snapshot, "host_hash", lambda: "elsewhere")
    assert run_cell(make_cell(blocks=1), runs).ran == 0
    with pytest.raises(StudyError, match=f"host {here}, but this is host elsewhere") as refused:
        run_cell(make_cell(blocks=2), runs)
    assert "--hostname), or set design.across_hosts=true" in str(refused.value)
    outcome = run_cell(make_cell(blocks=2, across_hosts=True), runs)
    assert (outcome.ran, outcome.already_done) == (3, 3)
    assert read_cell(make_cell().dir)["design"]["across_hosts"] is True


def test_a_command_that_another_host_refuses_changes_nothing(make_cell, monkeypatch):
    class OneFails(HostRuns):
        def fields(self, run, cell):
            failed = {} if run.block else {"outcome": "crashed", "detail": "planted"}
            return {**super().fields(run, cell), **failed}

    def files():
        runs = (path for path in make_cell().paths.runs.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in (make_cell().dir / "cell.json", *runs)}

    run_cell(make_cell(blocks=2), OneFails())
    (make_cell().paths.pending / "b02-p00-base.json").touch()
    before = files()
    monkeypatch.setattr(machine_snapshot, "host_hash", lambda: "elsewhere")
    for blocks, redo in ((3, False), (2, True)):
        with pytest.raises(StudyError, match="but this is host elsewhere"):
            run_cell(make_cell(blocks=blocks), HostRuns(), redo_failed=redo)
        assert files() == before


def test_a_run_ended_by_a_cluster_s_signal_is_not_a_failed_run(make_cell, monkeypatch):
    """Slurm signals every process of a job: the worker may die before its parent hears of it."""

    def warned(number, frame):
        raise SystemExit(-1)  # as submitit does, having queued the job again

    main = threading.main_thread().ident
    late = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR2))
    monkeypatch.setattr(child_process, "SIGNAL_S", 30.0)  # a busy machine fires the timer late

    class Warned(Progress):
        def started(self, runs):
            late.start()

    class Prepared(WorkerLauncher):
        def prepare(self, cell):
            pass  # else this worker may be the first to prepare these arms, and die then

    before = signal.signal(signal.SIGUSR2, warned)
    dies = Prepared((sys.executable, "-c", "import os; os.kill(os.getpid(), 12)"))
    cell = make_cell()
    try:
        with pytest.raises(SystemExit):
            run_cell(cell, dies, Warned())
    finally:
        late.join()  # else the signal ends the tests
        signal.signal(signal.SIGUSR2, before)
    assert read_runs(cell.dir) == []
    assert "time limit" in describe_last_session(cell.dir)
    assert run_cell(cell, PlantedRuns()).ran == 3


def test_an_edited_record_runs_its_block_again(make_cell):
    cell, runs = make_cell(blocks=2), PlantedRuns()
    run_cell(cell, runs)
    assert unlisted_records(cell.dir) == 0 and unfinished(cell) == []
    edited = cell.paths.record(of_block(cell, 1)[1])
    edited.write_text(edited.read_text().replace('"seed"', '"energy_j": 1, "seed"'))
    assert unfinished(cell) == of_block(cell, 1)
    assert run_cell(cell, runs).ran == 3
    assert unlisted_records(cell.dir) == 0 and len(read_runs(cell.dir)) == 6


def test_a_finished_cell_does_not_wait_for_the_timing_lock(make_cell):
    """Nothing is left to time, so another study that is timing is not in the way."""

    class NoWait(Progress):
        def note(self, line):
            if line.startswith("waiting"):
                raise StudyError(line)

    runs = PlantedRuns()
    run_cell(make_cell(control=False), runs)
    with timing_lock("/studies/other"):
        assert run_cell(make_cell(control=False), runs, NoWait()).already_done == 2
        with pytest.raises(StudyError, match="/studies/other"):
            run_cell(make_cell(control=False, blocks=2), runs, NoWait())


def test_a_signal_that_comes_while_a_finished_cell_is_read_ends_the_study(make_cell):
    """Else the next cell of the command would be measured."""

    class Signalled(Progress):
        def begin(self, cell, total, done):
            os.kill(os.getpid(), signal.SIGINT)

    runs = PlantedRuns()
    run_cell(make_cell(control=False), runs)
    with pytest.raises(Interrupted):
        run_cell(make_cell(control=False), runs, Signalled())


def test_one_compiled_kernel_is_singular():
    lines = []
    progress = SimpleNamespace(note=lines.append, run_ended=lambda record: None)
    runner = cell_runner._BlockRunner(None, None, progress, None)
    runner._show(SimpleNamespace(run="b00-p00-base", notes={"compiles": {"measure": 1}}))
    assert lines == ["b00-p00-base: 1 kernel was compiled while measuring"]
