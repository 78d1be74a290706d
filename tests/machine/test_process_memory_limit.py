"""A limit on the memory that a process may still allocate."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from labkit.machine.processes import process_memory_limit

TAKE = """
import sys
import numpy as np
from labkit.machine.processes import process_memory_limit
if sys.argv[2] == "plain":
    process_memory_limit.CGROUP_VERSIONS = ()
held = np.ones(64 << 17)  # 64 MiB that do not count
print(process_memory_limit.apply_memory_limit(100 << 20), flush=True)
taken = np.ones(int(sys.argv[1]) << 17)
print("taken", flush=True)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")


def take(mib: int, how: str) -> tuple[int, list[str], str, int]:
    child = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(mib), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, errors = child.communicate(timeout=60)
    return (
        child.returncode,
        out.split("\n")[:-1],
        errors,
        process_memory_limit.release_memory_limit(child.pid),
    )


def test_a_process_that_exceeds_the_limit_is_killed():
    code, lines, errors, kills = take(50, "best")
    assert (code, lines[1:], kills) == (0, ["taken"], 0), errors
    code, printed, errors, kills = take(300, "best")
    assert printed == lines[:1]
    if lines[0] == "RLIMIT_AS":
        assert code == 1 and "MemoryError" in errors and kills == 0
    else:
        assert code == -signal.SIGKILL and kills == 1


def test_without_a_cgroup_the_address_space_is_limited():
    assert take(50, "plain")[:2] == (0, ["RLIMIT_AS", "taken"])
    code, lines, errors, kills = take(300, "plain")
    assert (code, lines, kills) == (1, ["RLIMIT_AS"], 0) and "MemoryError" in errors


def test_a_lower_limit_of_the_address_space_is_named():
    ulimit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
    code = ulimit + TAKE.replace("100 << 20", "4 << 30")
    command = [sys.executable, "-c", code, "1", "plain"]
    child = subprocess.run(command, capture_output=True, text=True)
    (line,) = child.stderr.splitlines()[-1:]
    assert "MemoryLimitError: engine.memory_limit=4294967296: this process may allocate" in line


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(process_memory_limit.MemoryLimitError, match="on Linux only; leave it null"):
        process_memory_limit.apply_memory_limit(1 << 30)


def test_no_cgroup_is_left_behind():
    child = subprocess.Popen([sys.executable, "-c", TAKE, "1", "best"], stdout=subprocess.PIPE)
    child.communicate(timeout=60)
    process_memory_limit.release_memory_limit(child.pid)
    for version in process_memory_limit.CGROUP_VERSIONS:
        folder = process_memory_limit._limited_cgroup(version, child.pid)
        assert folder is None or not folder.exists()
    assert process_memory_limit.release_memory_limit(child.pid) == 0
