"""Process trees that a cleanup process kills, resumes or leaves alone when its parent ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit.machine.processes.process_reaper import ProcessReaper


@pytest.fixture
def child():
    """A process of its own group that waits."""
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield process
        process.kill()


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_watched_process_is_killed_even_if_it_is_stopped(child):
    with ProcessReaper() as cleanup:
        cleanup.kill_at_exit(child.pid)
        stop(child)
    assert child.wait(60) == -signal.SIGKILL


def test_a_stopped_process_is_resumed_and_lives(child):
    with ProcessReaper() as cleanup:
        cleanup.resume_at_exit(child.pid)
        stop(child)
    assert child.poll() is None
    assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("watch", [ProcessReaper.kill_at_exit, ProcessReaper.resume_at_exit])
def test_a_released_process_is_left_alone(child, watch):
    with ProcessReaper() as cleanup:
        watch(cleanup, child.pid)
        cleanup.release(child.pid)
        stop(child)
    assert child.poll() is None
    assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


def ignored(pid):
    """Return the mask of the signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_signals_to_a_whole_job_do_not_end_the_cleanup(child):
    numbers = [getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1", "USR2")]
    mask = sum(1 << number - 1 for number in numbers)
    with ProcessReaper() as cleanup:
        cleanup.kill_at_exit(child.pid)
        end = time.monotonic() + 30
        while ignored(cleanup._cleanup.pid) & mask != mask:
            assert time.monotonic() < end and cleanup._cleanup.poll() is None
            time.sleep(0.01)
        for number in numbers:
            cleanup._cleanup.send_signal(number)
    assert child.wait(60) == -signal.SIGKILL


def test_a_cleanup_that_was_killed_hides_no_other_end(child):
    with ProcessReaper() as cleanup:
        cleanup._cleanup.kill()
        cleanup._cleanup.wait()
        cleanup.release(child.pid)
        for tell in (cleanup.kill_at_exit, cleanup.resume_at_exit):
            with pytest.raises(BrokenPipeError, match="the process that would end the arms"):
                tell(child.pid)
    assert child.poll() is None
