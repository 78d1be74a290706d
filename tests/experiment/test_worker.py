"""The worker's command line, preparation of arms, and clocks that jump."""

from __future__ import annotations

import dataclasses
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.analysis import analyse_cell
from labkit.analysis.comparison.validity_gates import healthy
from labkit.config import Isolation
from labkit.experiment.launch import child_process, run_launcher, turn_coordinator
from labkit.experiment.launch.compile_once_marker import marker_path, write_marker
from labkit.experiment.launch.run_launcher import (
    LiveLauncher,
    ProcessLauncher,
    WorkerLauncher,
    _worker_variables,
)
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.worker import __main__ as worker
from labkit.experiment.worker.run_failures import RunFailure, failure_of
from labkit.machine.facts import machine_snapshot
from labkit.machine.facts.machine_observer import MachineObserver
from labkit.machine.processes import parent_death
from labkit.machine.processes.listening_processes import NoListener
from labkit.machine.worker_environment import worker_environment
from labkit.records import Arm, Record, read_record, read_runs, write_json

STUB = Path(__file__).with_name("stub_worker.py")


def by_hand(cell, *words):
    arm = cell.dir / "arms" / "base.json"
    arm.parent.mkdir(parents=True)
    write_json(arm, cell.arms[0].to_json())
    environ, _ = worker_environment(os.environ, threads=1, cores=1)
    return subprocess.run(
        [sys.executable, str(STUB), str(arm), *words], env=environ, capture_output=True, text=True
    )


def test_a_worker_started_on_the_command_line_writes_its_record(make_cell):
    cell = make_cell()
    path = cell.dir / "b03-p01-base.json"
    done = by_hand(cell, str(path))
    assert done.returncode == 0, done.stderr
    record = read_record(path)
    assert (record.block, record.position, record.arm, record.outcome) == (3, 1, "base", "ok")
    assert list(record.probe) == ["before", "after"]
    assert record.environment_end["cpu_ticks"] if sys.platform == "linux" else True


@pytest.mark.parametrize(
    ("name", "message"),
    [("b00-p00-other.json", "a run of arm other"), ("base.json", "not a run's name")],
)
def test_a_run_of_another_arm_is_refused(make_cell, name, message):
    cell = make_cell()
    done = by_hand(cell, str(cell.dir / name))
    assert done.returncode == os.EX_DATAERR
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (cell.dir / name).exists()


def test_an_orphan_writes_no_record(make_cell):
    cell = make_cell()
    path = cell.dir / "b00-p00-base.json"
    done = by_hand(cell, str(path), "--parent", "1")
    assert done.returncode < 0
    assert not path.exists()


def test_a_record_that_cannot_be_written_fails_the_process_and_loses_no_other(
    tmp_path, monkeypatch, capsys
):
    def perform(arms, runs, *_):
        return [Record(run.stem[-1], "arm", 0, int(run.stem[5:7]), 0, "ok", "now") for run in runs]

    monkeypatch.setattr(worker, "perform", perform)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(worker.faulthandler, "enable", lambda: None)
    (tmp_path / "file").touch()
    good, bad = tmp_path / "b00-p00-a.json", tmp_path / "file" / "b00-p01-b.json"
    assert worker.main(["arm", str(good)]) == 0
    for paths in ((good, bad), (bad, good)):
        good.unlink(missing_ok=True)
        words = [word for path in paths for word in ("arm", str(path))]
        assert worker.main(words) == worker.EXIT_CANNOT_WRITE
        assert good.is_file() and f"{bad}: " in capsys.readouterr().err


def without_processes(monkeypatch, failing="", last_line="", code=1):
    """Let the preparation of an arm fail, and any other process succeed; return the commands."""
    commands = []

    def run(command, *, log, **_):
        commands.append(command)
        fails = failing and "--prepare" in command and f"{failing}.json" in command[-1]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(last_line if fails else "")
        return child_process.ProcessExit(code if fails else 0, False, 0, 0.1)

    monkeypatch.setattr(child_process, "run", run)
    return commands


@pytest.fixture
def prepare(launcher, tmp_path, monkeypatch):
    """Return a function that prepares a cell's arms, with an empty cache at first."""

    def logs(cell):
        monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
        write_manifest(cell, 1)
        launcher.prepare(cell)
        return sorted(path.name for path in (cell.dir / "runs").glob("prepare-*"))

    return logs


def test_arms_are_prepared_once(make_cell, prepare, monkeypatch):
    without_processes(monkeypatch)
    logs = prepare(make_cell())
    assert logs == ["prepare-base.log", "prepare-seq_map.log"]  # control is base again
    assert prepare(make_cell(folder="other")) == []


def test_interleaved_arms_are_prepared_in_one_process(make_cell, prepare, monkeypatch):
    commands, before = [], child_process.run

    def run(command, **options):
        commands.append(command)
        return before(command, **options)

    monkeypatch.setattr(child_process, "run", run)
    prepare(make_cell(isolation=Isolation.in_process))
    (command,) = commands
    arms = [Path(word).stem for word in command[command.index("--prepare") + 1 :]]
    assert arms == ["base", "seq_map"]  # control is base again


def test_a_pilot_is_a_process_of_all_arms_or_of_one(make_cell, launcher):
    names = {}
    for isolation in (Isolation.in_process, Isolation.live):
        cell = make_cell(isolation=isolation, folder=isolation.value)
        write_manifest(cell, 1)
        pilot = launcher.pilot(cell, 1.5)
        (case,) = pilot["cases"]
        names[isolation.value] = case.pop("case")
        assert case == {"round_s": 1.5, "warm_up_s": 0.1, "sd": 0.2, "rounds": 3}
        assert 0 < pilot["start_s"] < 60 and not list(cell.paths.pending.iterdir())
    assert names == {
        "in_process": "binary_search+seq_map+binary_search",
        "live": "seq_map",
    }


def test_a_pilot_of_one_arm_is_not_that_of_an_arm_that_is_to_run_out_of_memory(
    make_cell, launcher, replace
):
    cell = make_cell(isolation=Isolation.live)
    arms = tuple(replace(arm, out_of_memory=arm.name == "seq_map") for arm in cell.arms)
    cell = replace(cell, arms=arms)
    write_manifest(cell, 1)
    assert launcher.pilot(cell, 1.0)["cases"][0]["case"] == "binary_search"


def test_a_pilot_runs_this_labkit_for_an_arm_of_a_revision(make_cell, launcher, monkeypatch):
    cell = make_cell(isolation=Isolation.live)
    write_manifest(cell, 1)
    elsewhere = {"revision": "0" * 40, "repository": "/nowhere"}
    arms = tuple(dataclasses.replace(arm, environment=elsewhere) for arm in cell.arms)
    assert launcher.pilot(dataclasses.replace(cell, arms=arms), 1.0) is not None


class Started(Exception):
    """Raised in place of a process's start."""


@pytest.mark.parametrize("isolation", ["process", "live"])
def test_a_server_s_start_has_time_of_its_own(
    make_cell, launcher, replace, tmp_path, monkeypatch, isolation
):
    limits = []

    def start(commands, *, timeout_s=None, **_):
        limits.append(timeout_s or [one.timeout_s for one in commands.values()])
        raise Started

    monkeypatch.setattr(child_process, "run", start)
    monkeypatch.setattr(turn_coordinator, "run", start)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    cell = make_cell(isolation=Isolation(isolation), timeout_s=60.0)
    engine = {"name": "openai", "server": {"preset": "null_server", "start_timeout_s": 900.0}}
    server = replace(cell.arms[0], config={**cell.arms[0].config, "engine": engine})
    cell = replace(cell, arms=(server, cell.arms[1]))
    steps = (
        lambda: launcher.prepare(cell),
        lambda: launcher.launch([Run(0, 0, "base")], cell),
        lambda: launcher.launch([Run(0, 1, "seq_map")], cell),
    )
    for step in steps:
        with pytest.raises(Started):
            step()
    runs = [960.0, 60.0] if isolation == "process" else [[960.0], [60.0]]
    assert limits == [run_launcher.PREPARE_TIMEOUT_S + 900.0, *runs]


def test_a_pilot_that_dies_is_none(make_cell, launcher, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "warm_up:kill")
    cell = make_cell(isolation=Isolation.live)
    write_manifest(cell, 1)
    assert launcher.pilot(cell, 1.0) is None


def test_an_arm_with_a_user_s_class_is_prepared_once_in_every_study(
    make_cell, launcher, prepare, replace, monkeypatch
):
    without_processes(monkeypatch)
    for folder, logs in (("one", ["prepare-base.log"]), ("two", [])):
        cell = make_cell(folder=folder)
        config = {**cell.arms[0].config, "seed": 1}
        config["engine"] = {**config["engine"]}
        config["engine"]["attention"] = {**config["engine"]["attention"], "resolver": "my.own:Maps"}
        cell = replace(cell, arms=(replace(cell.arms[0], config=config),))
        assert prepare(cell) == logs
    cell = replace(cell, dir=cell.dir.with_name("other study"))
    WorkerLauncher(launcher.of(cell).command).prepare(cell)
    assert (cell.dir / "runs" / "prepare-base.log").exists()


@pytest.mark.parametrize(
    ("line", "outcome", "detail"),
    [
        (
            "labkit.engine.EngineError: a.b=3: the server ended",
            "crashed",
            "EngineError: a.b=3: the",
        ),
        ("MemoryError", "oom", "MemoryError"),
    ],
)
def test_the_runs_of_an_arm_whose_preparation_failed_are_not_started(
    make_cell, launcher, tmp_path, monkeypatch, line, outcome, detail
):
    cell = make_cell(blocks=2)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    commands = without_processes(monkeypatch, "seq_map", line)
    run_cell(cell, launcher)
    started = [word for command in commands for word in command if "pending" in word]
    assert len(started) == 4 and not any("seq_map" in word for word in started)
    failed = [record for record in read_runs(cell.dir) if record.arm == "seq_map"]
    assert [record.outcome for record in failed] == [outcome] * 2
    assert failed[0].detail.startswith(f"its preparation failed: {detail}")
    assert failed[0].notes["log"] == "runs/prepare-seq_map.log"
    launcher.prepare(cell)  # as after an interim look
    assert sum("--prepare" in command for command in commands) == 2  # base, seq_map


@pytest.mark.parametrize("isolation", ["live", "in_process"])
def test_only_arms_in_the_process_of_one_that_is_not_prepared_fail_with_it(
    make_cell, launcher, tmp_path, monkeypatch, isolation
):
    cell = make_cell(isolation=Isolation(isolation))
    failure = RunFailure("crashed", "ValueError: no")
    launcher = launcher.of(cell)
    monkeypatch.setattr(launcher, "_unprepared", {"seq_map": failure})
    started = []

    def launch(runs, cell):
        started.extend(run.arm for run in runs)
        return []

    monkeypatch.setattr(launcher, "_launch", launch)
    records = launcher.launch(cell.schedule(), cell)
    details = {record.arm: record.detail for record in records}
    assert details["seq_map"] == "its preparation failed: ValueError: no"
    if isolation == "live":
        assert sorted(started) == ["base", "control"] and len(records) == 1
        return
    assert started == [] and len(records) == 3
    for arm in ("base", "control"):
        assert details[arm].startswith("in one process with b00-p0")
        assert details[arm].endswith("-seq_map: its preparation failed: ValueError: no")
    assert healthy(records, cell.arms).reasons[0].count("this ended the runs of") == 1


def test_arms_whose_shared_preparation_failed_are_prepared_again_with_others(
    make_cell, launcher, tmp_path, monkeypatch, replace
):
    """Which of them was the cause is not known, so none of them is lost to a later cell."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    commands = without_processes(monkeypatch, "seq_map", "RuntimeError: no")
    base, seq_map = make_cell(control=False).arms
    other = replace(seq_map, name="other", config={**seq_map.config, "seed": 1})
    cells = {
        "first": ("in_process", (base, seq_map), []),
        "the same arms": ("in_process", (base, seq_map), []),
        "other arms": ("in_process", (base, other), ["base", "other"]),
        "apart": ("process", (base, seq_map), ["base"]),
    }
    for folder, (isolation, arms, ready) in cells.items():
        cell = make_cell(folder=folder, control=False, isolation=Isolation(isolation))
        cell = replace(cell, arms=arms)
        write_manifest(cell, 1)
        launcher.prepare(cell)
        runs = launcher.of(cell)._ready(cell.schedule())
        assert sorted(run.arm for run in runs) == ready, folder
    words = (command[command.index("--prepare") + 1 :] for command in commands)
    prepared = [[Path(word).stem for word in one] for one in words]
    assert prepared == [["base", "seq_map"], ["base", "other"], ["seq_map"]]


def test_an_arm_that_is_to_run_out_of_memory_is_started_though_its_preparation_did(
    make_cell, launcher, tmp_path, monkeypatch, replace
):
    cell = make_cell()
    arms = [replace(arm, out_of_memory=arm.name == "seq_map") for arm in cell.arms]
    cell = replace(cell, arms=tuple(arms))
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    commands = without_processes(monkeypatch, "seq_map", "MemoryError")
    run_cell(cell, launcher)
    assert any("pending" in word and "seq_map" in word for words in commands for word in words)


@pytest.mark.parametrize(
    ("urls", "servers"),
    [
        ([None], []),
        (["http://here", "http://here", "http://also"], [4, 8]),
        (["http://unknown"], None),
        (["http://192.0.2.1", "http://also"], [4]),
    ],
)
def test_servers_that_labkit_did_not_start_are_observed_with_a_run(
    make_cell, launcher, replace, monkeypatch, urls, servers
):
    def find_listeners(url):
        if url == "http://unknown":
            raise NoListener("unknown is not a loopback address")
        return {"http://here": [8, 4], "http://also": [4]}[url]

    observed = []

    def observer(servers):
        observed.append(servers)
        return MachineObserver(servers)

    monkeypatch.setattr(run_launcher, "find_listeners", find_listeners)
    monkeypatch.setattr(run_launcher, "is_on_this_machine", lambda url: "192" not in url)
    monkeypatch.setattr(run_launcher, "MachineObserver", observer)
    without_processes(monkeypatch)
    cell = make_cell(isolation=Isolation.in_process)
    engines = [{"name": "openai", "server": {"url": url}} if url else {} for url in urls]
    arms = zip(cell.arms, engines, strict=False)
    cell = replace(cell, arms=tuple(replace(arm, config={"engine": one}) for arm, one in arms))
    launcher.launch(cell.schedule(), cell)
    assert observed == [servers]


ORPHANED = """
import os, signal, sys
from labkit.experiment.worker import __main__ as worker
from labkit.machine.processes.server_supervisor import SupervisedServer

worker.survive_hangups()
server = SupervisedServer(["sleep", "0.1"])
os.kill(os.getpid(), signal.SIGSTOP)
print(server.ended(), "and the worker goes on")
"""


def test_a_server_that_ends_while_its_worker_is_stopped_does_not_end_the_worker():
    """The kernel sends SIGHUP and SIGCONT to the process group, which the server's end orphans."""
    done = subprocess.run(
        [sys.executable, "-c", ORPHANED], capture_output=True, text=True, start_new_session=True,
        timeout=60,
    )  # fmt: skip
    expected = "ended with exit status 0; it wrote nothing and the worker goes on\n"
    assert (done.returncode, done.stdout) == (0, expected)


def test_the_marker_depends_on_the_arm_s_config(make_cell):
    base, seq_map, control = make_cell().arms
    assert marker_path(base) == marker_path(control)
    assert marker_path(base) != marker_path(seq_map)
    rate = {**base.config["workload"], "arrivals": {"rate": 8.0}}  # of another cell of a sweep
    assert marker_path(
        dataclasses.replace(base, config={**base.config, "workload": rate})
    ) == marker_path(base)


@pytest.mark.parametrize("kind", ["requests", "mine.kinds:Kind"])
def test_an_arm_with_a_class_of_the_user_s_is_prepared_again(make_cell, tmp_path, kind):
    """The class may have been edited."""
    arm = make_cell().arms[0]
    arm = dataclasses.replace(arm, config={**arm.config, "workload": {"kind": kind}})
    write_marker(tmp_path / "marker", arm)
    assert (tmp_path / "marker").exists() == (kind == "requests")


@pytest.mark.parametrize("isolation", ["process", "in_process"])
def test_a_study_goes_on_while_the_clock_is_set_back(make_cell, launcher, monkeypatch, isolation):
    """In the parent and in the workers: nothing is lost, and no number changes."""

    def study(folder, blocks):
        design = {"blocks": blocks, "isolation": Isolation(isolation), "control": False}
        cell = make_cell(folder=folder, **design)
        return cell, run_cell(cell, launcher)

    undisturbed, _ = study("undisturbed", 2)
    study("cell", 1)
    monkeypatch.setenv("LABKIT_TEST_FAULT", "startup:clock")
    set_back(monkeypatch)
    cell, outcome = study("cell", 2)
    assert (outcome.ran, outcome.already_done, outcome.failed) == (2, 2, ()) and outcome.seconds > 0
    records = read_runs(cell.dir)
    assert [r.run for r in records] == [r.run for r in read_runs(undisturbed.dir)]
    assert max(r.started for r in records[2:]) < min(r.started for r in records[:2])
    for record in records:
        assert min(record.seconds.values()) >= 0 and record.notes.get("gap_s", 0) >= 0
        assert record.seconds["measure"] <= record.seconds["total"]
    cells = [analyse_cell(folder.dir) for folder in (cell, undisturbed)]
    for analysed in cells:
        assert analysed.pop("environment")
        analysed.pop("cell")
    assert cells[0] == cells[1]
    assert study("cell", 2)[1].ran == 0


def set_back(monkeypatch):
    """Set the wall clock back at every look at it. Absolute sleeps fail, as under libfaketime."""
    steps = iter(range(10**9, 0, -1000))

    def refused(seconds):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(time, "time", lambda: float(next(steps)))
    monkeypatch.setattr(time, "sleep", refused)
    monkeypatch.setattr(
        machine_snapshot, "utc_now", lambda: f"2001-09-08T00:00:{next(steps):011d}Z"
    )


def test_a_child_that_ends_late_is_waited_for_without_an_absolute_sleep(tmp_path, monkeypatch):
    set_back(monkeypatch)
    code = "import os, sys, time; os.closerange(3, 99); time.sleep(0.1); sys.exit(7)"
    log = tmp_path / "log"
    for timeout_s, ended in ((60.0, True), (0.02, False)):
        ending = child_process.run(
            [sys.executable, "-S", "-c", code], environment={}, log=log, timeout_s=timeout_s
        )
        assert ending.timed_out is not ended and (ending.code == 7) is ended


def test_time_in_which_the_parent_was_suspended_is_not_a_child_s(tmp_path, monkeypatch):
    """As after ctrl-Z: the clock has gone on, and nobody looked at the child."""
    wait, clock, ahead = select.select, time.monotonic, [0.0]

    def suspended(*arguments):
        if ahead[0]:
            return wait(*arguments)
        ahead[0] = 1000.0
        return [], [], []

    monkeypatch.setattr(select, "select", suspended)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])
    code = "import os, sys, time; time.sleep(0.1); sys.exit(7)"
    ending = child_process.run(
        [sys.executable, "-S", "-c", code], environment={}, log=tmp_path / "log", timeout_s=60.0
    )
    assert not ending.timed_out and ending.code == 7
    assert ending.wall_s < 100.0 < 900.0 < ending.suspended_s


@pytest.mark.parametrize(
    ("kind", "total_s", "process_s", "lost_s"),
    [
        (ProcessLauncher, 3.0, 4.0, 60.0),
        (ProcessLauncher, 9.0, 9.0, 55.0),  # the worker went on for a while
        (LiveLauncher, 9.0, 4.0, 60.0),  # it was stopped, too
    ],
)
def test_seconds_of_a_run_that_ctrl_z_suspended(kind, total_s, process_s, lost_s):
    record = Record("base", "baseline", 0, 0, 7, "ok", "2026-11-20T20:00:00Z")
    record = dataclasses.replace(record, seconds={"total": total_s})
    assert kind()._seconds(record, 4.0, 0.0) == {"total": total_s, "process": 4.0}
    seconds = {"total": total_s, "process": process_s, "suspended": lost_s}
    assert kind()._seconds(record, 4.0, 60.0) == seconds


def test_no_record_is_written_if_the_parent_died_during_the_run(tmp_path, monkeypatch):
    class Ended(BaseException):
        pass

    def end():
        raise Ended

    monkeypatch.setattr(parent_death, "parent_is_alive", lambda parent: False)
    monkeypatch.setattr(parent_death, "kill_process_group", end)
    record = Record("base", "baseline", 0, 0, 7, "ok", "2026-11-20T20:00:00Z")
    with pytest.raises(Ended):
        worker._publish(tmp_path / "b00-p00-base.json", record, parent=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("[malloc_or_wait] Unable to allocate 4294967296 bytes."), "oom"),
        (RuntimeError("std::bad_alloc"), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (RuntimeError("another reason"), "crashed"),
        (ValueError("refused, in one line"), "refused"),
    ],
)
def test_the_outcome_of_an_exception_while_loading(error, outcome):
    assert failure_of(error, "load").outcome == outcome


def test_a_worker_has_only_the_mlx_variables_of_its_arm(monkeypatch):
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "3")
    arm = Arm("a", "arm", {}, {"engine": {"threads": 3, "mlx": {"bfs_max_width": 7}}})
    environ, removed = _worker_variables(arm)
    assert {n: v for n, v in environ.items() if n.startswith("MLX_")} == {"MLX_BFS_MAX_WIDTH": "7"}
    assert "MLX_MAX_OPS_PER_BUFFER" in removed
    assert int(environ["NUMBA_NUM_THREADS"]) >= 3
    monkeypatch.setattr("os.environ", environ)
    assert machine_snapshot.facts()["environ"]["mlx"] == {"MLX_BFS_MAX_WIDTH": "7"}
