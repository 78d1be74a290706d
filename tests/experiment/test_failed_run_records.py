"""What ended a preparation: its own word, or else its log and its exit status."""

from __future__ import annotations

import os
import signal

import pytest

from labkit.experiment.launch.child_process import ProcessExit
from labkit.experiment.launch.failed_run_records import EMPTY_LOG, crash_reason, preparation_failure
from labkit.experiment.worker.run_failures import RunFailure

WRITTEN = RunFailure("refused", 'engine.threads=3: "too many"')
DUMP = """working
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 522 in string_at
  File "/home/me/mine/maps.py", line 7 in maps
  File "/opt/venv/lib/python3.11/site-packages/labkit/x.py", line 3 in run

Extension modules: numpy.core, numba (total: 41)
"""
WATCH = """
Thread 0x00007e (most recent call first):
  File "/home/me/mine/watch.py", line 57 in watch
"""
THREADS = DUMP.replace("\n\nCurrent", f"\n{WATCH}\nCurrent", 1)  # the main thread is the last


@pytest.mark.parametrize(
    ("code", "last_line", "failure"),
    [
        (1, WRITTEN.to_line(), WRITTEN),
        (1, '{"outcome": "?", "detail": ""}', ("crashed", '{"outcome": "?", "detail": ""}')),
        (1, '{"outcome": "refused"}', ("crashed", '{"outcome": "refused"}')),
        (1, "17", ("crashed", "17")),
        (1, "a.b.EngineError: the server ended", ("crashed", "EngineError: the server ended")),
        (1, "MemoryError", ("oom", "MemoryError")),
        (1, "", ("crashed", "exit 1")),
        (os.EX_DATAERR, "engine.x=1: no such option", ("refused", "engine.x=1: no such option")),
        (-signal.SIGSEGV, WRITTEN.to_line(), ("crashed", WRITTEN.to_line())),
    ],
)
def test_a_preparation_fails_as_its_log_says(tmp_path, code, last_line, failure):
    log = tmp_path / "prepare.log"
    log.write_text(f"Traceback\n{last_line}\n" if last_line else "")
    found = preparation_failure(ProcessExit(code, timed_out=False, oom_kills=0, wall_s=1.0), log)
    expected = failure if isinstance(failure, RunFailure) else RunFailure(*failure)
    assert found == expected


def test_a_preparation_without_a_log_may_succeed_or_end_for_its_time_or_memory(tmp_path):
    log = tmp_path / "none.log"
    assert preparation_failure(ProcessExit(0, False, 0, 1.0), log) is None
    for timed_out, kills, outcome in ((True, 0, "timeout"), (False, 1, "oom")):
        ending = ProcessExit(-signal.SIGKILL, timed_out, kills, 1.0)
        assert preparation_failure(ending, log) == RunFailure(outcome, "SIGKILL")
    log.write_text(WRITTEN.to_line())
    late = ProcessExit(1, timed_out=True, oom_kills=0, wall_s=1.0)
    assert preparation_failure(late, log).outcome == "timeout"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", EMPTY_LOG),
        ("one\n\nthe last line\n", "the last line"),
        (DUMP, "Segmentation fault (/home/me/mine/maps.py:7, in maps)"),
        (
            DUMP.replace("/home/me", "/opt/lib/python3.11/site-packages"),
            "Segmentation fault (/usr/lib/python3.11/ctypes/__init__.py:522, in string_at)",
        ),
        (THREADS, "Segmentation fault (/home/me/mine/maps.py:7, in maps)"),
        (
            THREADS.replace("Current thread", "Thread"),  # a thread without Python frames died
            "Segmentation fault (/home/me/mine/maps.py:7, in maps)",
        ),
        ("Fatal Python error: Aborted\n", "Aborted"),
    ],
)
def test_the_reason_of_a_crash_is_the_user_s_own_line(tmp_path, log, reason):
    path = tmp_path / "run.log"
    path.write_text(log)
    assert crash_reason(path) == reason
