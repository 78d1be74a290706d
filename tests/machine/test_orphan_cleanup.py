"""Process trees that a cleanup process kills, resumes or leaves alone when its parent ends."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from labkit.machine.processes.orphan_cleanup import OrphanCleanup


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
    with OrphanCleanup() as cleanup:
        cleanup.kill_at_exit(child.pid)
        stop(child)
    assert child.wait(60) == -signal.SIGKILL


def test_a_stopped_process_is_resumed_and_lives(child):
    with OrphanCleanup() as cleanup:
        cleanup.resume_at_exit(child.pid)
        stop(child)
    assert child.poll() is None
    assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("watch", [OrphanCleanup.kill_at_exit, OrphanCleanup.resume_at_exit])
def test_a_released_process_is_left_alone(child, watch):
    with OrphanCleanup() as cleanup:
        watch(cleanup, child.pid)
        cleanup.release(child.pid)
        stop(child)
    assert child.poll() is None
    assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
