"""Facts from git, from macOS's tools and from nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil  # noqa: F401  # before a test says that this is a Mac: it looks once
import pytest
from git_command import git

from labkit.machine.facts import (
    best_effort,
    code_revision,
    linux,
    machine_snapshot,
    macos,
    macos_tools,
    nvidia,
)
from labkit.machine.facts.machine_observer import MachineObserver

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def checkout(tmp_path):
    for name in ("labkit/a.py", "conf/a.yaml", "outputs/x.json"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("one\n")

    git(tmp_path, "init")
    git(tmp_path, "add", "labkit", "conf")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_files_beside_the_code_are_no_changes(checkout):
    assert code_revision.uncommitted_changes(checkout) == "clean"
    (checkout / "outputs" / "x.json").write_text("two\n")
    assert code_revision.uncommitted_changes(checkout) == "clean"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a checkout to another user")
def test_changes_are_found_in_another_user_s_checkout(checkout):
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, 12345, 12345)
    assert code_revision.uncommitted_changes(checkout) == "clean"
    (checkout / "labkit" / "a.py").write_text("two\n")
    assert code_revision.uncommitted_changes(checkout) not in ("clean", None)


@pytest.mark.parametrize("gitdir", ["{}/.git/worktrees/tree", "../.git/worktrees/tree"])
def test_a_worktree_may_name_its_folder_by_any_path(checkout, gitdir):
    git(checkout, "worktree", "add", "tree")
    (checkout / "tree" / ".git").write_text(f"gitdir: {gitdir.format(checkout)}\n")
    assert code_revision.commit(checkout / "tree") == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", ["labkit/a.py", "conf/a.yaml", "labkit/new.py"])
def test_every_code_change_has_its_own_hash(checkout, name):
    path = checkout / name
    before = path.read_text() if path.exists() else None
    path.write_text("two\n")
    two = code_revision.uncommitted_changes(checkout)
    path.write_text("three\n")
    three = code_revision.uncommitted_changes(checkout)
    assert len({two, three, "clean"}) == 3
    assert len(two) == len(three) == 16
    path.write_text("two\n")
    assert code_revision.uncommitted_changes(checkout) == two
    path.unlink() if before is None else path.write_text(before)
    assert code_revision.uncommitted_changes(checkout) == "clean"


def test_git_variables_of_another_repository_are_ignored(checkout, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert code_revision.uncommitted_changes(checkout) == "clean"


def test_without_checkout_or_git_the_result_is_none(checkout, tmp_path_factory, monkeypatch):
    assert code_revision.uncommitted_changes(tmp_path_factory.mktemp("plain")) is None
    monkeypatch.setenv("PATH", "")
    assert code_revision.uncommitted_changes(checkout) is None


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


def test_outputs_of_macos_tools_are_parsed(monkeypatch):
    monkeypatch.setattr(macos_tools, "command_output", lambda *command: ANSWERS[command])
    facts = macos_tools.surroundings()
    assert facts["power"] == {
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
    assert facts["vm"] == {
        "page_bytes": 16384,
        "pages_free": 12045,
        "pages_wired_down": 131072,
        "translation_faults": 987654321,
        "file_backed_pages": 222222,
        "swapouts": 7,
    }


def test_a_missing_tool_leaves_its_field_out(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "power" not in macos_tools.surroundings()
    assert "vm" not in macos_tools.surroundings()


def test_a_tool_that_fails_or_hangs_leaves_its_field_out(monkeypatch):
    monkeypatch.setattr(best_effort, "TOOL_TIMEOUT_S", 60.0)
    with pytest.raises(OSError, match="status 3"):
        best_effort.command_output(sys.executable, "-c", "raise SystemExit(3)")
    monkeypatch.setattr(best_effort, "TOOL_TIMEOUT_S", 0.05)
    with pytest.raises(OSError, match="timed out"):
        best_effort.command_output(sys.executable, "-c", "import time; time.sleep(60)")


def test_neither_the_observer_nor_a_worker_starts_a_process_on_macos(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    observer = MachineObserver()
    observer.sample(1)
    assert observer.report()["samples"]["load"][0] >= 0
    assert "loadavg" in machine_snapshot.state()
    with pytest.raises(AssertionError):
        machine_snapshot.surroundings()


IOREG = """
+-o IOHIDSystem  <class IOHIDSystem, id 0x1000003c8, registered, matched, active>
    {
      "HIDIdleTime" = 4230000000
      "HIDParameters" = {"HIDScrollZoomModifierMask"=0}
    }
"""
TMUTIL = """Backup session status:
{
    ClientID = "com.apple.backupd";
    Percent = "0.42";
    Running = 1;
}
"""
PS = """  0.3 launchd
 61.2 mds_stores
  9,5 mdworker_shared
"""
PS_PID = """    1   0.3 launchd
  400  61.2 mds_stores
  500  99.0 python3.12
  600   7,5 Google Chrome He
  700   0.0 kernel_task
"""


@pytest.fixture
def mac_says(monkeypatch):
    """Return the surroundings of a Mac whose programs print these texts."""

    def surroundings(**texts):
        def output(*command):
            return texts["_".join(command[:2]).replace("-", "")]

        monkeypatch.setattr(macos_tools, "command_output", output)
        return macos_tools.surroundings()

    return surroundings


def test_background_work_on_a_mac_is_detected(mac_says):
    facts = mac_says(
        ioreg_c=IOREG, ioreg_r='{"DisplayAttributes" = {}}', tmutil_status=TMUTIL, ps_Aceo=PS
    )
    assert (facts["hid_idle_s"], facts["displays"]) == (4.2, 1)
    assert facts["background"] == {"time_machine": True, "spotlight": True}
    ended, idle = TMUTIL.replace("Running = 1", "Running = 0"), "  0.3 launchd\n  0.4 mds_stores\n"
    facts = mac_says(ioreg_c="nothing", ioreg_r="", tmutil_status=ended, ps_Aceo=idle)
    assert not {"hid_idle_s", "displays"} & facts.keys()
    assert facts["background"] == {"time_machine": False, "spotlight": False}


def test_the_busiest_foreign_processes_exclude_our_own(mac_says):
    own = PS_PID.replace("  500 ", f"{os.getpid():5} ")
    assert mac_says(ps_Aceo=own)["top_foreign"] == [
        {"name": "mds_stores", "cpu_pct": 61.2},
        {"name": "Google Chrome He", "cpu_pct": 7.5},
        {"name": "launchd", "cpu_pct": 0.3},
    ]


def test_processes_are_accounted_for_without_linux_files():
    me = os.getpid()
    assert macos.busy_s() > macos.process_cpu_s(me) > 0
    assert macos.process_memory(me)["rss_bytes"] > 1 << 20
    assert macos.process_memory()["rss_bytes"] > 1 << 20
    total, free = macos.memory()
    assert 0 < free < total
    assert macos.process_cpu_s(1 << 30) == 0.0
    with pytest.raises(OSError, match=str(1 << 30)):
        macos.process_memory(1 << 30)


CHILD = "x = bytearray(64 << 20)\nprint(1, flush=True)\nwhile True: pass"
PARENT = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.parametrize("system", [macos, pytest.param(linux, marks=linux_only)])
def test_process_memory_includes_descendants(system):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        parent.stdout.readline()
        before, end = system.process_cpu_s(parent.pid), time.monotonic() + 30
        while system.process_cpu_s(parent.pid) < before + 0.2 and time.monotonic() < end:
            time.sleep(0.05)
        assert system.process_cpu_s(parent.pid) >= before + 0.2  # the parent itself only waits
        assert system.process_memory(parent.pid)["rss_bytes"] > 64 << 20
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_nvidia_smi_runs_only_with_a_driver(tmp_path, monkeypatch):
    assert nvidia.state(tmp_path / "none") is None
    line = "1980, 2619, 700.00, 71.30, 31, 0x0000000000000001, Enabled, [N/A]\n"
    answers = iter([line, "123\n456\n"])
    monkeypatch.setattr(nvidia, "command_output", lambda *command: next(answers))
    driver = tmp_path / "version"
    driver.touch()
    assert nvidia.state(driver) == [
        {
            "sm_mhz": 1980.0,
            "memory_mhz": 2619.0,
            "power_limit_w": 700.0,
            "power_w": 71.3,
            "temperature_c": 31.0,
            "throttle_reasons": "0x0000000000000001",
            "persistence": "Enabled",
            "processes": 2,
        }
    ]
