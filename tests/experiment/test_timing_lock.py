"""The timing lock: one timed cell per host, first come, first served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from labkit.experiment import Interrupted, StudyError
from labkit.experiment.schedule import timing_lock
from labkit.experiment.schedule.timing_lock import SHARED_FOLDER, Ticket, timing_tickets

ROOT = Path(__file__).resolve().parents[2]

WAITER = """
import sys
from labkit.experiment.schedule.timing_lock import timing_lock
say = lambda line: print(line, flush=True)
with timing_lock(sys.argv[1], on_wait=say, poll_s=0.01):
    say("timing")
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Let the lock lie in a folder of the test's own."""
    monkeypatch.setenv("LABKIT_LOCK_DIR", str(tmp_path / "locks"))
    return tmp_path / "locks"


class Waiter:
    """A process that wants to time, and does so until its standard input ends."""

    def __init__(self, name):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WAITER, name],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.communicate()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def enough():
    raise Interrupted("enough")


def test_waiting_processes_are_served_in_the_order_of_arrival(folder):
    """The second is killed while it waits; the third says whom it waits for."""
    started = []
    with timing_lock.timing_lock("/studies/first"):
        for name in ("/studies/second", "/studies/third", "/studies/fourth"):
            started.append(Waiter(name))
            waiting = started[-1].line()
            assert f"waiting: /studies/first (pid {os.getpid()}, user " in waiting
        second, third, fourth = started
        assert waiting.endswith("; 2 more come first")
        second.kill()
    assert third.line() == "timing"
    assert f"/studies/third (pid {third.process.pid}" in fourth.line()
    assert len(timing_tickets()) == 3  # the killed process's is there, and in nobody's way
    with pytest.raises(Interrupted), timing_lock.timing_lock("late", check=enough):
        pytest.fail("two hold the lock")
    assert [ticket.is_live for ticket in timing_tickets()] == [True, True]
    third.kill()
    line = fourth.line()
    while line.startswith("waiting: "):  # it may have seen the third before it timed
        line = fourth.line()
    assert line == "timing"
    fourth.end()
    assert [ticket.is_live for ticket in timing_tickets()] == [False]


def test_a_ticket_is_readable_at_every_moment_while_it_is_rewritten(folder, monkeypatch):
    """Between any two calls of the system, a waiting process reads the old facts or the new."""
    seen = []

    def watched(name):
        call = getattr(os, name)

        def calls(*arguments):
            seen.extend(ticket.describe() for ticket in timing_tickets())
            result = call(*arguments)
            seen.extend(ticket.describe() for ticket in timing_tickets())
            return result

        return calls

    with timing_lock._take_ticket("/studies/mine", "cpu") as (_, descriptor):
        for name in ("ftruncate", "pwrite"):
            monkeypatch.setattr(timing_lock.os, name, watched(name))
        timing_lock._write(descriptor, "/studies/mine", 1e9, 5.0)
        timing_lock._write(descriptor, "/m", None, None)  # a shorter text leaves nothing behind
        assert {line.partition(" (pid")[0] for line in seen} == {"/studies/mine", "/m"}


def test_the_folder_is_the_host_s_and_not_of_one_user_s_temporary_files(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_LOCK_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert timing_lock._folder() == SHARED_FOLDER == Path("/tmp/labkit-locks")


def test_every_user_can_take_a_ticket_and_read_the_others(folder):
    umask = os.umask(0o077)
    try:
        with timing_lock.timing_lock("mine"):
            assert folder.stat().st_mode & 0o7777 == 0o1777
            (ticket,) = timing_tickets()
            assert ticket.path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(umask)


def test_another_user_s_dead_ticket_stays_and_is_in_nobody_s_way(folder, monkeypatch):
    def denied(path):
        raise PermissionError(1, "Operation not permitted")

    folder.mkdir()
    (folder / "cpu-7.ticket").write_text("")
    monkeypatch.setattr(Path, "unlink", denied)
    with timing_lock.timing_lock("mine", on_wait=pytest.fail):
        assert [ticket.number for ticket in timing_tickets()] == [7, 8]


def test_tickets_are_numbers_and_not_words(folder):
    folder.mkdir()
    for number in (9, 10):
        (folder / f"cpu-{number}.ticket").touch()
    assert [ticket.number for ticket in timing_tickets()] == [9, 10]


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_clock_that_jumps_changes_no_wait_for_a_lock(monkeypatch, jump_s):
    def refused(seconds):
        raise OSError(22, "Invalid argument")  # as under libfaketime

    lines, polls, now = [], [], time.time()

    def give_up():
        polls.append(1)
        if len(polls) == 3:
            enough()

    with timing_lock.timing_lock("outputs/first"):
        monkeypatch.setattr(time, "time", lambda: now + jump_s)
        monkeypatch.setattr(time, "sleep", refused)
        with (
            pytest.raises(Interrupted),
            timing_lock.timing_lock("b", on_wait=lines.append, check=give_up, poll_s=0.001),
        ):
            pytest.fail("two hold the lock")
    assert len(lines) == 1 and lines[0].endswith("(0 s)")


def test_each_device_has_its_own_lock():
    with (
        timing_lock.timing_lock("one", device="cpu"),
        timing_lock.timing_lock("two", device="gpu0", on_wait=pytest.fail),
    ):
        assert len(timing_tickets("cpu")) == len(timing_tickets("gpu0")) == 1


def test_a_folder_that_cannot_be_used_is_an_error_of_one_line(folder):
    folder.write_text("a file")
    with pytest.raises(StudyError, match="the timing lock can't be used") as error:
        timing_lock.timing_lock("one").__enter__()
    assert "LABKIT_LOCK_DIR" in str(error.value) and "\n" not in str(error.value)


def test_an_unreadable_ticket_has_a_description(folder):
    folder.mkdir()
    (folder / "cpu-1.ticket").write_text("{")
    ticket = Ticket(folder / "cpu-1.ticket")
    assert ticket.describe() == "another process is timing on this host"
