"""The fingerprint describes the machine and never names the host."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.machine.facts import code_revision, linux, machine_snapshot, macos

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_fingerprint_is_json_and_names_no_host():
    text = json.dumps(machine_snapshot.take(), allow_nan=False)
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert f"/{getpass.getuser()}/" not in text


def test_a_mac_is_the_same_host_under_another_name(monkeypatch):
    def of(name, uuid, platform="darwin"):
        def gethostuuid(into, wait):
            into[:] = uuid
            return 0

        with monkeypatch.context() as host:
            host.setattr(sys, "platform", platform)
            host.setattr(socket, "gethostname", lambda: name)
            host.setattr(macos.ctypes, "CDLL", lambda _: SimpleNamespace(gethostuuid=gethostuuid))
            return machine_snapshot.host_hash()

    mac = of("mac.local", range(16))
    assert mac == of("mac.vpn", range(16)) and mac != of("mac.local", range(1, 17))
    assert of("a", range(16), "linux") != of("b", range(16), "linux")


@linux_only
def test_the_fields_that_the_analysis_reads_are_there():
    facts = machine_snapshot.take()
    for name in (
        "host",
        "cpu_model",
        "cores",
        "memory_bytes",
        "os",
        "swap",
        "cpu_ticks",
        "loadavg",
    ):
        assert name in facts, name
    assert facts["swap"]["used_bytes"] >= 0
    assert facts["versions"]["labkit"]
    assert facts["peak_rss_bytes"] > 1 << 20


@linux_only
def test_the_state_is_read_from_the_right_fields(monkeypatch):
    files = {"/proc/uptime": "5000.25 9000.50\n", "/proc/loadavg": "0.5 0.25 0.125 3/900 4242\n"}
    real = linux._read_text
    monkeypatch.setattr(
        linux, "_read_text", lambda path: files[str(path)] if str(path) in files else real(path)
    )
    state = linux.state()
    assert (state["uptime_s"], state["runnable"]) == (5000.25, 3)
    assert state["loadavg"] == [0.5, 0.25, 0.125]


@linux_only
def test_no_process_is_started(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    assert machine_snapshot.take()["cores"] >= 1


def test_the_environment_digest_depends_on_every_variable(monkeypatch):
    before = machine_snapshot.facts()["environ"]
    monkeypatch.setenv("LABKIT_TEST_X", "1")
    after = machine_snapshot.facts()["environ"]
    assert after["bytes"] > before["bytes"]
    assert after["sha256"] != before["sha256"] and len(after["sha256"]) == 16
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    assert machine_snapshot.facts()["environ"]["mlx"]["MLX_METAL_FAST_SYNCH"] == "1"


def test_the_commit_equals_gits():
    root = Path(machine_snapshot.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    code_revision.commit.cache_clear()
    assert code_revision.commit() == head.stdout.strip()


@linux_only
def test_missing_facts_are_left_out(monkeypatch):
    monkeypatch.setattr(linux, "_read_text", lambda path: "garbage")
    facts = linux.state()
    assert "swap" not in facts
    assert "loadavg" not in facts


@linux_only
def test_the_cpu_time_of_a_process_includes_its_children():
    """A server that a run has started is not foreign load, running or ended."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    before = linux.process_cpu_s(os.getpid())
    child = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    assert linux.process_cpu_s(os.getpid()) - before >= 0.28
    child.communicate(b"\n")
    assert linux.process_cpu_s(os.getpid()) - before >= 0.28
    assert linux.process_cpu_s(1 << 22) == 0.0
