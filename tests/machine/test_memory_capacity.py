"""Memory: macOS sysctls, this machine, and this process."""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from labkit.machine.facts import macos, memory_capacity, wired_advice
from labkit.machine.facts.macos import WiredSettings
from labkit.machine.facts.memory_capacity import GIB, MemoryProfile
from labkit.machine.facts.simulated_macs import find_profile, simulated_mac

# --------------------------------------------------------------------------- macOS


def test_sysctls_are_read_by_name():
    kernel = {
        "iogpu.wired_limit_mb": 26624,
        "iogpu.disable_wired_collector": 1,
        "iogpu.dynamic_lwm": 0,
    }
    assert macos.wired_settings(kernel.get) == WiredSettings(
        26624, collector=False, dynamic_lwm=False
    )


def test_missing_sysctls_are_none():
    def nothing(_name):
        return None

    assert macos.wired_settings(nothing) == WiredSettings(None, None, None)


@pytest.mark.skipif(sys.platform == "darwin", reason="tests that other systems have no Metal")
def test_without_metal_the_working_set_is_all_memory():
    assert macos.recommended_working_set() is None
    assert macos.sysctl("hw.memsize") is None
    machine = memory_capacity.this_machine()
    assert not machine.metal and machine.working_set == machine.total and machine.wired is None


def test_coregraphics_is_loaded_before_metal_is_asked_for_its_device(monkeypatch):
    loaded = []

    def library(path):
        loaded.append(path.rpartition("/")[2])
        device = Mock(side_effect=lambda: 1 if "CoreGraphics" in loaded else None)
        return SimpleNamespace(MTLCreateSystemDefaultDevice=device)

    monkeypatch.setattr(macos.ctypes, "CDLL", library)
    assert macos._metal_device() == 1


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_a_process_without_mlx_knows_the_working_set():
    code = "from labkit.machine.facts import macos; print(macos.recommended_working_set())"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(alone.stdout) == macos.recommended_working_set()


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_a_real_mac_reports_its_working_set():
    machine = memory_capacity.this_machine()
    assert machine.metal and machine.total // 2 < machine.working_set <= machine.total
    assert macos.sysctl("hw.memsize") == memory_capacity.operating_system().memory()[0]


# --------------------------------------------------------------------------- machines


def test_this_machine():
    machine = find_profile(None)
    assert not machine.is_simulated
    assert 0 < machine.available <= machine.total <= memory_capacity.operating_system().memory()[0]
    assert machine.slack > 0


@pytest.mark.parametrize(
    "numbers", [{"available": 11}, {"available": -1}, {"working_set": 0}, {"working_set": 11}]
)
def test_inconsistent_sizes_are_refused(numbers):
    sizes = {"total": 10, "available": 5, "working_set": 7, **numbers}
    with pytest.raises(ValueError, match="must each fit into"):
        MemoryProfile("x", metal=True, **sizes)


# --------------------------------------------------------------------------- advice


def test_a_budget_above_the_working_set_gets_advice():
    machine = simulated_mac("sim_m1_pro_32gb")
    limit, collector = wired_advice.advise(machine, 26 * GIB)
    assert limit.command == "sudo sysctl iogpu.wired_limit_mb=26624"
    assert "21.3 GiB" in limit.finding and "6.0 GiB" in limit.risk
    assert collector.command == "sudo sysctl iogpu.disable_wired_collector=1"
    assert all("reboot" in one.risk for one in (limit, collector))


def test_no_advice_without_an_obstacle():
    machine = simulated_mac("sim_m1_pro_32gb")
    (only,) = wired_advice.advise(machine, 20 * GIB)
    assert "collector" in only.command
    off = MemoryProfile(
        **{**vars(machine), "wired": WiredSettings(0, collector=False, dynamic_lwm=False)}
    )
    assert wired_advice.advise(off, 20 * GIB) == ()
    none = MemoryProfile(**{**vars(machine), "wired": None})
    assert wired_advice.advise(none, 31 * GIB) == ()


def test_no_advice_helps_where_more_is_needed_than_the_machine_has():
    machine = simulated_mac("sim_m1_pro_32gb")
    limit, _ = wired_advice.advise(machine, 32 * GIB)
    assert "0.0 GiB" in limit.risk
    assert wired_advice.advise(machine, 32 * GIB + 1) == ()


# --------------------------------------------------------------------------- this process


def test_peak_rss_includes_freed_memory_and_excludes_the_parents():
    parents = bytearray(b"x") * (300 << 20)
    code = (
        "from labkit.machine.facts.operating_system_protocol import operating_system\n"
        "before = operating_system().peak_rss()\n"
        "data = bytearray(b'x') * (64 << 20)\n"
        "del data\n"
        "print(before, operating_system().peak_rss())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del parents
    before, after = map(int, done.stdout.split())
    assert before < 200 << 20
    assert after - before > 50 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; glibc keeps freed memory")
def test_trim_heap_returns_freed_memory():
    code = (
        "from labkit.machine.facts import memory_capacity\n"
        "def held():\n"
        "    return 4096 * int(open('/proc/self/statm').read().split()[1])\n"
        "del (first := [bytearray(b'x') * (31 << 20)])[0]  # from now on they share a heap\n"
        "blocks = [bytearray(b'x') * (16 << 20) for _ in range(8)]\n"
        "last = bytearray(b'x') * (1 << 20)\n"
        "blocks.clear()\n"
        "before = held()\n"
        "memory_capacity.trim_heap()\n"
        "print(before, held())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before - after > 100 << 20
