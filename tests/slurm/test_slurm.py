"""A study through a real Slurm: jobs that are requeued, cancelled, or run out of time."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time

import pytest
from studies import BLOCKS, cells, command, own_environment, tables

pytestmark = pytest.mark.slurm


@pytest.fixture
def here(tmp_path, cluster):
    """A folder of the test's own, and the environment of its commands."""
    return tmp_path, {**cluster, **own_environment(tmp_path)}


def launch(here, *words):
    """Start a study in Slurm."""
    folder, environ = here
    return subprocess.Popen(
        command(*words, "hydra/launcher=slurm"),
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(study, seconds=420):
    """Wait for a study; return its exit status and output."""
    out, err = study.communicate(timeout=seconds)
    print(out[-3000:], err[-3000:])
    return study.returncode, err


def jobs(here):
    """Return the state of every job that the queue knows, by name."""
    command = ["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T"]
    output = subprocess.run(command, env=here[1], capture_output=True, text=True).stdout
    return dict(line.split("|") for line in output.split())


def slurm(here, *command):
    subprocess.run(command, env=here[1], check=True, capture_output=True)


def in_the_middle(here, out, study, known=()):
    """Wait until some cell has a block and lacks others; return it and its job."""
    end = time.monotonic() + 240
    while time.monotonic() < end and study.poll() is None:
        for cell in cells(here[0] / out):
            blocks = {path.name[:3] for path in (cell / "runs").glob("b*.json")}
            running = [
                j for j, state in jobs(here).items() if state == "RUNNING" and j not in known
            ]
            if 2 <= len(blocks) < BLOCKS - 1 and running:
                sitting = json.loads((cell / "sitting.json").read_text())
                assert sitting["job"] == f"Slurm job {running[0]}"
                return cell, running[0]
        time.sleep(0.1)
    pytest.fail(f"no cell was ever in the middle: {ended(study, 60)}")


def test_a_requeued_job_ends_with_the_tables_of_a_local_study(here, local):
    study = launch(here, "out=study")
    cell, job = in_the_middle(here, "study", study)
    slurm(here, "scontrol", "requeue", job)
    end = time.monotonic() + 60
    while json.loads((cell / "sitting.json").read_text())["how"] is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    stopped = json.loads((cell / "sitting.json").read_text())
    status, err = ended(study)
    assert status == 0, err
    assert (stopped["how"], stopped["job"]) == ("SIGTERM", f"Slurm job {job}")
    after = json.loads((cell / "sitting.json").read_text())
    assert (after["how"], after["job"]) == ("done", f"Slurm job {job}, start 2")
    assert tables(here[0] / "study") == local
    report = (here[0] / "study" / "report.md").read_text()
    assert all(f"| {path.name.split('__')[0]}" in report for path in cells(here[0] / "study"))


def test_a_cancelled_job_is_named_and_its_cell_resumed(here, local):
    study = launch(here, "out=study")
    cell, job = in_the_middle(here, "study", study)
    slurm(here, "scancel", job)
    status, err = ended(study)
    assert status == 1
    assert f"labkit: Slurm job {job}: CANCELLED" in err
    assert re.search(rf"labkit: {re.escape(cell.name)}: \d+ of 18 runs are missing; .*SIGTERM", err)
    report = (here[0] / "study" / "report.md").read_text()
    assert re.search(rf"unfinished: \d of {BLOCKS} blocks; Slurm job {job} .*SIGTERM", report)
    others = [path for path in tables(here[0] / "study") if path != cell.name]
    assert others and all(tables(here[0] / "study")[name] == local[name] for name in others)
    again = shlex.split(err.strip().splitlines()[-1].partition("continue with: python ")[2])
    done = subprocess.run(
        [sys.executable, *again], cwd=here[0], env=here[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert tables(here[0] / "study") == local


def test_a_killed_launcher_leaves_jobs_that_a_new_one_waits_for(here, local):
    study = launch(here, "out=study")
    cell, _ = in_the_middle(here, "study", study)
    study.kill()
    study.communicate()
    before = {path: path.stat().st_mtime_ns for path in (cell / "runs").glob("b*.json")}
    status, err = ended(launch(here, "out=study"))
    assert status == 0, err
    assert tables(here[0] / "study") == local
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(cell.glob("runs/abandoned/*.json"))


def test_a_lost_node_is_named(here):
    more = "hydra.launcher.additional_parameters"
    study = launch(here, "out=study", f"~{more}.requeue", f"+{more}.no_requeue=true")
    cell, job = in_the_middle(here, "study", study)
    node = subprocess.run(["hostname", "-s"], capture_output=True, text=True).stdout.strip()
    try:
        slurm(here, "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        time.sleep(20)
    finally:  # it may have come back by itself
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], env=here[1])
    status, err = ended(study)
    assert status == 1
    assert f"labkit: Slurm job {job}: NODE_FAIL" in err
    assert f"labkit: {cell.name}: " in err


def test_an_expired_time_limit_is_named_and_the_job_continues(here, local):
    """The first start is cut after a minute, wherever the cell is; the next ends it."""
    times = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=45")
    study = launch(here, "out=study", *times, "design.blocks=14")
    seen = set()
    while study.poll() is None:
        for cell in cells(here[0] / "study"):
            text = (cell / "sitting.json").read_text()
            seen.add(json.loads(text)["how"] if text else None)
        time.sleep(0.2)
    status, err = ended(study)
    assert any(how and "time limit" in how for how in seen), (seen, err)
    assert status == 0, err
