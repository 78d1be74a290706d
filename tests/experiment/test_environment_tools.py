"""What is asked of git, pmset and vm_stat."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.experiment import environment, environment_git, environment_macos
from labkit.experiment.observer import Observer
from labkit.experiment.record import read_runs
from labkit.experiment.runner import run_cell


@pytest.fixture
def checkout(tmp_path):
    for name in ("labkit/a.py", "conf/a.yaml", "outputs/x.json"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("one\n")

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    git("add", "labkit", "conf")
    git("commit", "-m", "one")
    return tmp_path


def test_a_clean_checkout_is_clean_whatever_lies_beside_the_code(checkout):
    assert environment_git.changes(checkout) == "clean"
    (checkout / "outputs" / "x.json").write_text("two\n")
    assert environment_git.changes(checkout) == "clean"


@pytest.mark.parametrize("name", ["labkit/a.py", "conf/a.yaml", "labkit/new.py"])
def test_a_change_to_the_code_has_a_hash_of_its_own(checkout, name):
    path = checkout / name
    before = path.read_text() if path.exists() else None
    path.write_text("two\n")
    two = environment_git.changes(checkout)
    path.write_text("three\n")
    three = environment_git.changes(checkout)
    assert len({two, three, "clean"}) == 3
    assert len(two) == len(three) == 16
    path.write_text("two\n")
    assert environment_git.changes(checkout) == two
    path.unlink() if before is None else path.write_text(before)
    assert environment_git.changes(checkout) == "clean"


def test_another_repository_s_variables_change_nothing(checkout, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert environment_git.changes(checkout) == "clean"


def test_no_checkout_and_no_git_are_not_known(checkout, tmp_path_factory, monkeypatch):
    assert environment_git.changes(tmp_path_factory.mktemp("plain")) is None
    monkeypatch.setenv("PATH", "")
    assert environment_git.changes(checkout) is None


def test_every_record_says_what_was_changed(make_cell, launcher, monkeypatch):
    monkeypatch.setattr(environment_git, "changes", lambda: "0123456789abcdef")
    cell = make_cell()
    run_cell(cell, launcher)
    found = {r.environment["git_changes"] for r in read_runs(cell.dir)}
    assert found == {"0123456789abcdef"}


# The tools' answers as their manual pages and public logs show them.
BATT = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=4522083)\t81%; charging; 1:02 remaining present: true
"""
CUSTOM = """Battery Power:
 lowpowermode         1
 sleep                1
AC Power:
 lowpowermode         0
 sleep                0 (sleep prevented by caffeinate)
"""
THERM = """Note: No thermal warning level has been recorded
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 62
"""
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               12045.
Pages wired down:                        131072.
"Translation faults":                 987654321.
File-backed pages:                       222222.
Swapouts:                                     7.
"""
ANSWERS = {
    ("pmset", "-g", "batt"): BATT,
    ("pmset", "-g"): " powermode            0\n lowpowermode         1\n",
    ("pmset", "-g", "custom"): CUSTOM,
    ("pmset", "-g", "therm"): THERM,
    ("vm_stat",): VM_STAT,
}


def test_macos_tools_are_read(monkeypatch):
    monkeypatch.setattr(environment_macos, "_output", lambda *command: ANSWERS[command])
    found = environment_macos.state()
    assert found["power"] == {
        "source": "AC Power",
        "settings": {"powermode": "0", "lowpowermode": "1"},
        "custom": {
            "Battery Power": {"lowpowermode": "1", "sleep": "1"},
            "AC Power": {"lowpowermode": "0", "sleep": "0"},
        },
        "limits": {
            "CPU_Scheduler_Limit": "100",
            "CPU_Available_CPUs": "8",
            "CPU_Speed_Limit": "62",
        },
    }
    assert found["vm"] == {
        "page_bytes": 16384,
        "pages_free": 12045,
        "pages_wired_down": 131072,
        "translation_faults": 987654321,
        "file_backed_pages": 222222,
        "swapouts": 7,
    }


def test_a_tool_that_is_not_there_leaves_its_field_out(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "power" not in environment_macos.state()
    assert "vm" not in environment_macos.state()


def test_a_tool_that_fails_or_hangs_leaves_its_field_out(monkeypatch):
    monkeypatch.setattr(environment_macos, "TOOL_S", 60.0)
    with pytest.raises(OSError, match="status 3"):
        environment_macos._output(sys.executable, "-c", "raise SystemExit(3)")
    monkeypatch.setattr(environment_macos, "TOOL_S", 0.05)
    with pytest.raises(OSError, match="timed out"):
        environment_macos._output(sys.executable, "-c", "import time; time.sleep(60)")


def test_the_observer_starts_no_process_on_macos(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    observer = Observer()
    observer.sample(1)
    assert "loadavg" in observer.report()["samples"]["state"][0]
    with pytest.raises(AssertionError):
        environment.state()
