"""Fault injection: every failure has a named outcome, and finished blocks stay."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from planted_runs import PlantedRuns

from labkit import analysis
from labkit.experiment import StudyError
from labkit.experiment.launch import child_process
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.records import read_runs

TESTS = Path(__file__).parents[1]


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def running(mark: str) -> list[int]:
    """Return the processes with ``mark`` in a word of their command line."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(mark.encode() in word for word in words):
            processes.append(int(entry.parent.name))
    return processes


def workers(folder: Path) -> list[int]:
    return running(f"{folder}/runs")


OUTCOMES = {
    "startup:kill": ("crashed", "SIGKILL"),
    "load:kill": ("crashed", "SIGKILL"),
    "warm_up:segv": ("crashed", "SIGSEGV"),
    "measure:exit": ("crashed", "exit status 7"),
    "measure:norecord": ("crashed", "without a record"),
    "write:kill": ("crashed", "SIGKILL"),
    "write:half": ("invalid_output", "not valid JSON"),
    "write:nan-json": ("invalid_output", "JSON has no NaN"),
    "load:value": ("refused", "planted value"),
    "load:memory": ("oom", "out of memory"),
    "measure:raise": ("crashed", "measure: RuntimeError: planted"),
    "measure:stale": ("stale", "planted stamp"),
    "measure:poison": ("invalid_output", "planted NaN"),
    "measure:nan": ("invalid_output", "metric dispatch_us: nan is not a finite number"),
    "measure:vacuous": ("vacuous", "resolver.seq_map stayed 0"),
}


def test_a_failing_arm_has_a_named_outcome(make_cell, launcher, monkeypatch, replace):
    """One study, in which every arm but the baseline fails in its own way."""
    cell = make_cell(control=False)
    base, failing = cell.arms
    arms = {fault: fault.replace(":", "_").replace("-", "_") for fault in OUTCOMES}
    faults = (f"{fault}:{arm}" for fault, arm in arms.items())
    monkeypatch.setenv("LABKIT_TEST_FAULT", " ".join(faults))
    cell = replace(cell, arms=(base, *(replace(failing, name=arm) for arm in arms.values())))
    result = run_cell(cell, launcher)
    records = {r.arm: r for r in read_runs(cell.dir)}
    assert records.pop("base").ok
    assert {fault: records[arm].outcome for fault, arm in arms.items()} == {
        fault: outcome for fault, (outcome, _) in OUTCOMES.items()
    }
    for fault, (_, detail) in OUTCOMES.items():
        assert detail in records[arms[fault]].detail and "\n" not in records[arms[fault]].detail
    assert sorted(result.failed) == sorted(record.run for record in records.values())


PREPARED = {
    "load:value": ("refused", "planted value"),
    "load:memory": ("oom", "load: out of memory: MemoryError"),
    "load:kill": ("crashed", "SIGKILL"),
    "warm_up:value": ("crashed", "warm_up: ValueError: planted value"),
    "warm_up:stale": ("stale", "planted stamp"),
}


def test_an_arm_that_cannot_be_prepared_has_the_outcome_that_its_run_would_have(
    make_cell, launcher, tmp_path, monkeypatch, replace
):
    """One study, in which the preparation of every arm but the baseline fails in its own way."""
    cell = make_cell(control=False)
    base, failing = cell.arms
    arms = {fault: fault.replace(":", "_") for fault in PREPARED}
    faults = (f"prepare-{fault}:{arm}" for fault, arm in arms.items())
    monkeypatch.setenv("LABKIT_TEST_FAULT", " ".join(faults))
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    apart = (  # each has a preparation of its own
        replace(failing, name=arm, config={**failing.config, "seed": seed})
        for seed, arm in enumerate(arms.values())
    )
    run_cell(replace(cell, arms=(base, *apart)), launcher)
    records = {r.arm: r for r in read_runs(cell.dir)}
    assert records.pop("base").ok
    assert {arm: (r.outcome, r.detail) for arm, r in records.items()} == {
        arms[fault]: (outcome, f"its preparation failed: {detail}")
        for fault, (outcome, detail) in PREPARED.items()
    }


def test_a_hanging_worker_is_killed_with_its_group(make_cell, launcher, time_over, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:hang:seq_map")
    cell = make_cell(control=False)
    run_cell(cell, launcher)
    record = next(r for r in read_runs(cell.dir) if r.arm == "seq_map")
    assert record.outcome == "timeout"
    assert "killed after" in record.detail
    assert any("stub_worker.py" in line for line in record.notes["log_tail"])


def test_a_kill_by_the_kernel_is_out_of_memory(make_cell, launcher, monkeypatch):
    counts = iter(range(100))
    monkeypatch.setattr(child_process, "_oom_kills", lambda: next(counts))
    monkeypatch.setenv("LABKIT_TEST_FAULT", "load:kill:seq_map")
    cell = make_cell(control=False)
    run_cell(cell, launcher)
    outcomes = {r.arm: r.outcome for r in read_runs(cell.dir)}
    assert outcomes == {"base": "ok", "seq_map": "oom"}


@linux_only
def test_processes_that_a_worker_leaves_running_are_killed(make_cell, launcher, monkeypatch):
    mark = f"{3000 + os.getpid() / 1e7:.7f}"
    monkeypatch.setenv("LABKIT_TEST_SLEEP", mark)
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:leave")
    assert run_cell(make_cell(control=False), launcher).failed == ()
    time.sleep(0.2)
    assert not running(mark)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_one_clear_error(make_cell, launcher):
    cell = make_cell(blocks=2)
    run_cell(make_cell(blocks=1), PlantedRuns())
    runs = cell.dir / "runs"
    runs.chmod(0o500)
    try:
        with pytest.raises(StudyError, match="Permission denied"):
            run_cell(cell, launcher)
        assert len(read_runs(cell.dir)) == 3
    finally:
        runs.chmod(0o700)


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    make_cell, launcher, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("in the way")
    cell = make_cell()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(StudyError, match="LABKIT_CACHE"):
        run_cell(cell, launcher)


def test_a_full_disk_in_the_worker_is_one_clear_error(make_cell, launcher, monkeypatch):
    cell = make_cell(blocks=2)
    run_cell(make_cell(blocks=1), PlantedRuns())
    kept = read_runs(cell.dir)
    monkeypatch.setenv("LABKIT_TEST_FAULT", "write:full")
    with pytest.raises(StudyError, match="No space left on device"):
        run_cell(cell, launcher)
    assert read_runs(cell.dir) == kept
    assert run_cell(cell, PlantedRuns()).ran == 3


def test_a_full_disk_in_the_parent_is_one_clear_error(make_cell):
    cell, runs = make_cell(blocks=2), PlantedRuns()
    run_cell(make_cell(blocks=1), runs)
    kept = read_runs(cell.dir)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(StudyError, match="File too large; finished blocks stay; run the same"):
            run_cell(cell, runs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_runs(cell.dir) == kept
    assert run_cell(cell, runs).ran == 3


def test_a_file_in_place_of_the_folder_is_one_clear_error(make_cell, launcher, tmp_path):
    (tmp_path / "cell").write_text("in the way")
    with pytest.raises(StudyError, match="run the same command again to continue"):
        run_cell(make_cell(), launcher)


STUDY = textwrap.dedent(
    """
    import os, pathlib, sys, tempfile
    sys.path.insert(0, {here!r})
    tempfile.tempdir = {tmp!r}
    from stub_arms import STUB, make_arm
    from labkit import config
    from labkit.experiment import Interrupted, progress_display
    from labkit.experiment.schedule import cell_runner
    arms = (make_arm("base", "baseline"), make_arm("control", "control"))
    design = config.Design(
            blocks=int(sys.argv[2]), runs_per_block=1, isolation=config.Isolation.process
        )
    cell = cell_runner.ReadyCell(pathlib.Path(sys.argv[1]), "cell", arms, design, 7)
    launcher = cell_runner.WorkerLauncher((sys.executable, str(STUB)))
    try:
        cell_runner.run_cell(cell, launcher, progress_display.create_progress(sys.stderr))
    except Interrupted as stop:
        print("interrupted", stop, flush=True)
        sys.exit(130)
    """
)


@pytest.fixture
def start_study(tmp_path, stub_cache):
    """Return a function that starts a study in a process of its own; none is left at the end."""
    studies = []

    def start(folder: str = "cell", blocks: int = 1) -> subprocess.Popen[str]:
        studies.append(_start(tmp_path, stub_cache, folder, blocks))
        return studies[-1]

    yield start
    for study in studies:
        study.kill()
        study.wait()
        study.stdout.close()


def _start(tmp_path: Path, cache: Path, folder: str, blocks: int) -> subprocess.Popen[str]:
    script = tmp_path / "study.py"
    script.write_text(STUDY.format(here=str(TESTS), tmp=str(tmp_path)))
    root = str(TESTS.parent)
    environ = {**os.environ, "PYTHONPATH": root, "LABKIT_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / folder), str(blocks)],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


def wait_for_worker(study: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a worker of the study runs; a study that ends before shows what it printed."""

    def started() -> bool:
        assert study.poll() is None, study.communicate()[0]
        return bool(workers(folder))

    wait_for(started, 120.0)


@linux_only
def test_a_signal_ends_the_worker_and_the_study_resumes(start_study, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_SECONDS", "300")
    for number in (signal.SIGINT, signal.SIGTERM):
        study = start_study()
        wait_for_worker(study, tmp_path / "cell")
        study.send_signal(number)
        text, _ = study.communicate(timeout=60)
        assert study.returncode == 130, number
        assert f"interrupted {number.name}" in text
        assert "Traceback" not in text
        assert not workers(tmp_path / "cell")
    monkeypatch.setenv("LABKIT_TEST_SECONDS", "0")
    again = start_study()
    text, _ = again.communicate(timeout=60)
    assert again.returncode == 0, text
    assert len(read_runs(tmp_path / "cell")) == 2


def shown(folder: Path) -> dict:
    """Give the analysed cell without what differs between any two studies."""
    cell = analysis.analyse_cell(folder)
    assert cell.pop("environment")
    return cell


@linux_only
@pytest.mark.slow
def test_a_parent_killed_at_any_moment_loses_nothing(start_study, tmp_path):
    start = time.monotonic()
    study = start_study("probe", blocks=16)
    wait_for(lambda: list((tmp_path / "probe").rglob("b*.json")), 120.0)
    first_record_s = time.monotonic() - start
    study.kill()
    study.communicate()
    folder, bodies = tmp_path / "cell", set()
    for attempt in range(20):
        study = start_study(blocks=16)
        time.sleep(first_record_s * (0.3 + 0.1 * attempt))
        study.kill()
        study.communicate()
        wait_for(lambda: not workers(folder))
        if folder.exists():
            read_runs(folder)
        now = {path.read_bytes() for path in folder.rglob("b*.json")}
        assert bodies <= now, "a record was lost"
        bodies = now
    assert bodies
    for name in ("cell", "undisturbed/cell"):
        text, _ = start_study(name, blocks=16).communicate(timeout=120)
    assert shown(folder) == shown(tmp_path / "undisturbed" / "cell"), text


@linux_only
def test_two_studies_are_timed_one_after_the_other(start_study, tmp_path, monkeypatch):
    """The second goes on when the first is killed, whose worker ends with it."""
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setenv("LABKIT_TEST_SECONDS", "300")
    first = start_study("one")
    wait_for_worker(first, one)
    monkeypatch.setenv("LABKIT_TEST_SECONDS", "0")
    second = start_study("two")
    lines = iter(second.stdout.readline, "")
    line = next((line for line in lines if line.startswith("waiting")), "it did not wait")
    assert "has been timing on this host since" in line and f"pid {first.pid}" in line
    assert workers(one) and not workers(two)
    first.kill()
    wait_for(lambda: not workers(one))
    assert not list((one / "runs").glob("*.json"))
    text, _ = second.communicate(timeout=60)
    assert second.returncode == 0, text
    assert len(read_runs(two)) == 2


@linux_only
def test_the_same_study_started_twice_runs_once(start_study, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_SECONDS", "0.2")
    for study in [start_study() for _ in range(2)]:
        text, _ = study.communicate(timeout=60)
        assert study.returncode == 0, text
    assert len(read_runs(tmp_path / "cell")) == 2
    assert not (tmp_path / "cell" / "runs" / "abandoned").exists()
