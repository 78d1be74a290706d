"""The cell's lock: one process per cell; a child ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from process_state import running

from labkit.experiment import Interrupted, StudyError
from labkit.experiment.schedule.cell_folder_lock import cell_lock
from labkit.records import describe_last_session, is_locked

ROOT = Path(__file__).resolve().parents[2]

PARENT = textwrap.dedent(
    """
    import os, subprocess, sys
    child = '''
    import os, sys, time
    {patch}
    from labkit.machine.processes import parent_death
    parent_death.watch_parent(int(sys.argv[1]), {lifeline})
    print(os.getpid(), flush=True)
    time.sleep(60)
    '''.replace("\\n    ", "\\n")
    reader, writer = os.pipe()
    subprocess.Popen(
        [sys.executable, "-c", child, str(os.getpid()), str(reader)],
        pass_fds=(reader,), start_new_session=True,
    ).wait()
    """
)


@pytest.mark.parametrize("lifeline", ["None", "int(sys.argv[2])"])
@pytest.mark.parametrize("patch", ["", "sys.platform = 'other'"])
def test_a_child_ends_with_its_parent(patch, lifeline):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(patch=patch, lifeline=lifeline)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 5
    while running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(child)


def test_one_process_at_a_time_works_on_a_cell(tmp_path):
    holders = []

    def give_up():
        if holders:
            raise Interrupted("enough")

    assert describe_last_session(tmp_path / "cell") == "no process has worked on it"
    with cell_lock(tmp_path / "cell"):
        assert is_locked(tmp_path / "cell")
        with (
            pytest.raises(Interrupted),
            cell_lock(tmp_path / "cell", on_wait=holders.append, check=give_up, poll_s=0.01),
        ):
            pytest.fail("two work on a cell")
    assert f"process {os.getpid()} on host" in holders[0]
    assert "has been working on it since" in holders[0]
    assert not is_locked(tmp_path / "cell")
    assert "ended its work at" in describe_last_session(tmp_path / "cell")


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_linked_session_file_is_not_followed(tmp_path, link):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "cell").mkdir()
    link(tmp_path / "cell" / "sitting.json", tmp_path / "mine")
    with (
        pytest.raises(StudyError, match=r"sitting\.json: the cell's lock (can't|must)"),
        cell_lock(tmp_path / "cell"),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Interrupted("SIGTERM"), ": SIGTERM"),
        (SystemExit(-1), "time limit"),
        (OSError(28, "No space left\n on device"), "OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_session_names_the_error_that_stopped_it(tmp_path, error, message):
    with pytest.raises(type(error)), cell_lock(tmp_path):
        raise error
    assert "was stopped at" in describe_last_session(tmp_path) and message in describe_last_session(
        tmp_path
    )


def test_a_killed_session_has_no_end(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from labkit.experiment.schedule.cell_folder_lock import cell_lock
with cell_lock(Path({str(tmp_path)!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "12"}
    subprocess.run([sys.executable, "-c", code], env=environ)
    assert not is_locked(tmp_path)
    sentence = describe_last_session(tmp_path)
    assert sentence.startswith("Slurm job 12 (process ") and sentence.endswith(
        "or its node is lost"
    )
    with cell_lock(tmp_path):
        pass
    assert "ended its work" in describe_last_session(tmp_path)


def test_a_job_of_an_array_that_was_restarted_has_slurm_s_name(tmp_path, monkeypatch):
    job = {"JOB_ID": "13", "ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "4", "RESTART_COUNT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with cell_lock(tmp_path):
        assert describe_last_session(tmp_path).startswith("Slurm job 12_4, start 2 (process ")
