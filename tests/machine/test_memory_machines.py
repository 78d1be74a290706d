"""Providers: cgroups on Linux, sysctls on macOS, and the simulated Macs."""

import sys

import pytest

from labkit import config
from labkit.machine import memory, memory_linux, memory_machine, memory_macos, memory_wired
from labkit.machine.memory_machine import GIB, MIB, Machine
from labkit.machine.memory_macos import Wired


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


# --------------------------------------------------------------------------- Linux


def test_the_room_is_the_limit_less_what_is_used_but_files_can_be_dropped(tmp_path):
    stat = "anon 700\ninactive_file 40\nactive_file 9\n"
    write(tmp_path, memory__max="1000\n", memory__current="800\n", memory__stat=stat)
    assert memory_linux.room(tmp_path) == 240
    write(tmp_path, memory__current="1200\n")
    assert memory_linux.room(tmp_path) == 0
    write(tmp_path, memory__max="max\n")
    assert memory_linux.room(tmp_path) is None


def test_cgroup_v1_is_read_too(tmp_path):
    write(
        tmp_path,
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="300",
        memory__stat="cache 5\ntotal_inactive_file 50\n",
    )
    assert memory_linux.room(tmp_path) == 750


@pytest.mark.parametrize(
    ("controller", "files"),
    [
        ("", {"memory__max": "5000000\n", "memory__current": "4000000\n"}),
        (
            "memory",
            {"memory__limit_in_bytes": "5000000\n", "memory__usage_in_bytes": "4000000\n"},
        ),
    ],
)
def test_a_limit_above_the_own_cgroup_counts(controller, files, tmp_path, monkeypatch):
    own, above = tmp_path / "own", tmp_path / "above"
    write(own, memory__max="max\n")
    write(above, **files)
    folders = {controller: [own, above]}
    monkeypatch.setattr(memory, "cgroup_folders", lambda controller="": folders.get(controller, []))
    assert memory.cgroup_limit() == 5_000_000
    assert memory.read().available == 1_000_000
    machine = memory_machine.this_machine()
    assert (machine.total, machine.available) == (5_000_000, 1_000_000)


# --------------------------------------------------------------------------- macOS


def test_sysctls_are_read_by_their_names():
    kernel = {
        "iogpu.wired_limit_mb": 26624,
        "iogpu.disable_wired_collector": 1,
        "iogpu.dynamic_lwm": 0,
        "kern.memorystatus_vm_pressure_level": 2,
        "vm.compressor_bytes_used": 6 * GIB,
    }
    assert memory_macos.wired(kernel.get) == Wired(26624, collector=False, dynamic_lwm=False)
    assert memory_macos.pressure(kernel.get) == memory_macos.Pressure("warning", 6 * GIB)


def test_what_the_kernel_does_not_tell_stays_unknown():
    def nothing(_name):
        return None

    assert memory_macos.wired(nothing) == Wired(None, None, None)
    assert memory_macos.pressure(nothing) == memory_macos.Pressure(None, None)


@pytest.mark.skipif(sys.platform == "darwin", reason="tests that other systems have no Metal")
def test_no_metal_no_hint():
    assert memory_macos.recommended_working_set() is None
    assert memory_macos.sysctl("hw.memsize") is None
    machine = memory_machine.this_machine()
    assert not machine.metal and machine.hint == machine.total and machine.wired is None


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_a_real_mac_tells_its_working_set():
    machine = memory_machine.this_machine()
    assert machine.metal and machine.total // 2 < machine.hint <= machine.total
    assert memory_macos.sysctl("hw.memsize") == memory.read().total


# --------------------------------------------------------------------------- machines


def test_the_schema_lists_the_machines_there_are():
    assert tuple(memory_machine.SIMULATED) == config.MACHINES


@pytest.mark.parametrize(
    ("name", "ram_gib", "hint_mib", "free_gib"),
    [
        ("sim_m1_8gb", 8, 5461, 5),
        ("sim_m1_pro_16gb", 16, 10922, 12),
        ("sim_m1_pro_32gb", 32, 21845, 24),
        ("sim_m3_pro_36gb", 36, 27648, 27),
        ("sim_m1_max_64gb", 64, 49152, 52),
        ("sim_m2_max_96gb", 96, 73728, 84),
        ("sim_m5_max_128gb", 128, 110100, 116),
        ("sim_m3_ultra_512gb", 512, 393216, 500),
    ],
)
def test_simulated_machines(name, ram_gib, hint_mib, free_gib):
    machine = memory_machine.find(name)
    assert machine.total == ram_gib * GIB and machine.available == free_gib * GIB
    assert machine.hint // MIB == hint_mib
    assert machine.simulated and machine.metal and machine.slack == 0


def test_this_machine():
    machine = memory_machine.find(None)
    assert not machine.simulated
    assert 0 < machine.available <= machine.total <= memory.read().total
    assert machine.slack > 0


@pytest.mark.parametrize(
    "numbers", [{"available": 11}, {"available": -1}, {"hint": 0}, {"hint": 11}]
)
def test_numbers_that_no_machine_has_are_refused(numbers):
    given = {"total": 10, "available": 5, "hint": 7, **numbers}
    with pytest.raises(ValueError, match="are no machine"):
        Machine("x", metal=True, **given)


# --------------------------------------------------------------------------- advice


def test_a_budget_above_the_working_set_gets_the_command_that_lifts_it():
    machine = memory_machine.simulated("sim_m1_pro_32gb")
    limit, collector = memory_wired.advise(machine, 26 * GIB)
    assert limit.command == "sudo sysctl iogpu.wired_limit_mb=26624"
    assert "21.3 GiB" in limit.finding and "6.0 GiB" in limit.risk
    assert collector.command == "sudo sysctl iogpu.disable_wired_collector=1"
    assert all("reboot" in one.risk for one in (limit, collector))


def test_no_advice_where_nothing_is_in_the_way():
    machine = memory_machine.simulated("sim_m1_pro_32gb")
    (only,) = memory_wired.advise(machine, 20 * GIB)
    assert "collector" in only.command
    off = Machine(**{**vars(machine), "wired": Wired(0, collector=False, dynamic_lwm=False)})
    assert memory_wired.advise(off, 20 * GIB) == ()
    none = Machine(**{**vars(machine), "wired": None})
    assert memory_wired.advise(none, 31 * GIB) == ()
