"""The status that a worker shares with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from labkit.experiment.launch.run_launcher import _work_text
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.worker.worker_status import (
    SIZE,
    STOPPED_START,
    TEXT_START,
    VARIABLE,
    SharedStatus,
    WorkerStatus,
)

CODE = """
import os, signal
from labkit.experiment.worker.worker_status import WorkerStatus
status = WorkerStatus.from_environment()
status.begin_turn(0)
status.end_turn()
status.begin_turn(2)
status.show("measuring for long")
status.show("3 of 8 rounds")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_parent_sees_the_turn_and_the_text_of_a_killed_process():
    with SharedStatus() as status:
        assert status.turn is None and status.text == ""
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, **status.environment},
            pass_fds=[status.fd],
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        assert (status.turn, status.text) == (2, "3 of 8 rounds")


def test_a_worker_without_a_parent_s_descriptor_has_memory_of_its_own(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    status = WorkerStatus.from_environment()
    status.begin_turn(1)
    status.show("x" * 2 * SIZE)
    other = WorkerStatus.from_environment()
    assert status._memory[:].endswith(b"x" * (STOPPED_START - TEXT_START) + bytes(8))
    assert status.stopped_s() == 0
    assert other._memory[:] == bytes(SIZE)


def test_the_descriptor_is_not_handed_to_the_worker_s_children(monkeypatch):
    with SharedStatus() as shared:
        monkeypatch.setenv(VARIABLE, str(shared.fd))
        WorkerStatus.from_environment().begin_turn(1)
        assert VARIABLE not in os.environ and shared.turn == 1


@pytest.mark.parametrize(
    ("turns", "texts", "expected"),
    [
        ([1], ["loading"], "loading seq_map"),
        ([None], ["warming up"], "warming up"),
        ([1], ["8 of 32 requests"], "8 of 32 requests"),
        ([None, 0], ["", "loading"], "loading seq_map"),  # live: a process for each arm
        ([None, None], ["", ""], ""),
    ],
)
def test_the_text_names_the_arm_that_loads_or_warms_up(turns, texts, expected):
    statuses = [SharedStatus() for _ in turns]
    for shared, turn, text in zip(statuses, turns, texts, strict=True):
        worker = WorkerStatus(shared.fd)
        worker.show(text)
        if turn is not None:
            worker.begin_turn(turn)
    assert _work_text([Run(0, 0, "base"), Run(0, 1, "seq_map")], statuses) == expected
    for shared in statuses:
        with shared:
            pass


def test_a_worker_reads_the_sum_of_its_stops():
    with SharedStatus() as status:
        worker = WorkerStatus(os.dup(status.fd))
        status.add_stop(0.25)
        status.add_stop(1.5)
        assert worker.stopped_s() == 1.75 and status.text == ""
