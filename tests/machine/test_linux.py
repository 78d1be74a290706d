"""Facts read from files of /proc and /sys with known contents."""

import os
from pathlib import Path

import pytest

from labkit.machine.facts import linux

STAT = "cpu  100 20 30 4000 50 6 7 80 9 9\ncpu0 1 2 3\nctxt 1234\nctxtra 5\nbtime 77\n"
MEMINFO = "MemTotal: 8000 kB\nMemAvailable: 3000 kB\nSwapTotal: 500 kB\nSwapFree: 200 kB\nHuge: 3\n"
CPUINFO = (
    "processor : 0\nmodel name : Chip: 9\ncpu family : 6\nmodel : 85\nno value\ncpu MHz : 2000.0\n"
    "\nprocessor : 1\nmodel name : Other\ncpu MHz : 2500.5\n"
)
VMSTAT = "pswpin 11\npswpout 12\noom_kill 13\n"
STATUS = "Name: x\nVmHWM: 90 kB\nVmRSS: 70 kB\nVmSwap: 5 kB\nThreads: 3\n"
TIMES = ") S " + " ".join(map(str, range(101, 120)))  # fields 11 to 14 after the name are times


@pytest.fixture
def files(monkeypatch, tmp_path):
    """Texts by path, which a test changes; every other file is missing."""
    texts = {
        "/proc/stat": STAT,
        "/proc/meminfo": MEMINFO,
        "/proc/cpuinfo": CPUINFO,
        "/proc/vmstat": VMSTAT,
        "/proc/pressure/memory": "some avg10=1.5 avg60=2 avg300=3 total=400\nfull avg10=9\n",
        "/proc/self/status": STATUS,
    }

    def read(path):
        if str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr(linux, "_read_text", read)
    monkeypatch.setattr(linux, "CPU_FOLDER", tmp_path)
    monkeypatch.setattr(linux, "_ticks_per_s", lambda: 10)
    monkeypatch.setattr(linux, "children", lambda pid: [8, 9] if pid == 7 else [])
    return texts


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_times_and_memory_come_from_their_fields(files):
    assert linux.state()["cpu_ticks"] == {
        "user": 100, "nice": 20, "system": 30, "idle": 4000, "iowait": 50, "irq": 6, "softirq": 7,
        "steal": 80,
    }  # fmt: skip
    assert (linux.busy_s(), linux.stolen_s()) == (16.3, 8.0)
    files["/proc/stat"] = "cpu 1 2 3 4 5 6 7\nctxt 1\n"  # an old kernel
    assert linux.stolen_s() is None
    assert linux.memory() == (8000 * 1024, 3000 * 1024)
    assert linux.state()["swap"] == {"used_bytes": 300 * 1024, "pages_in": 11, "pages_out": 12}
    assert linux.state()["pressure"] == {"memory": {"avg10": 1.5, "total_us": 400.0}}
    del files["/proc/pressure/memory"]
    assert "pressure" not in linux.state()
    assert linux.state()["context_switches"] == 1
    files["/proc/stat"] = STAT
    assert linux.state()["context_switches"] == 1234


def test_kills_are_the_container_s_where_it_counts_them(files):
    assert linux.oom_kills() == 13
    files["/sys/fs/cgroup/memory/memory.oom_control"] = "under_oom 0\noom_kill 3\n"
    assert linux.oom_kills() == 3
    files["/sys/fs/cgroup/memory.events"] = "low 0\noom_kill 2\n"
    assert linux.oom_kills() == 2


def test_clocks_and_throttling_are_those_of_all_cores(files, tmp_path):
    assert linux.state()["mhz"] == 2250.2 and "thermal" not in linux.state()
    files["/proc/cpuinfo"] = "processor : 0\n"
    assert "mhz" not in linux.state()
    for core, (khz, events) in enumerate([(1_000_000, 2), (3_000_000, 5)]):
        write(tmp_path / f"cpu{core}/cpufreq/scaling_cur_freq", f"{khz}\n")
        write(tmp_path / f"cpu{core}/thermal_throttle/core_throttle_count", f"{events}\n")
    write(tmp_path / "cpufreq/scaling_cur_freq", "9\n")
    state = linux.state()
    assert (state["mhz"], state["thermal"]) == (2000.0, {"throttled": 7})
    assert linux.sample() == {"mhz": 2000.0, "available_bytes": 3000 * 1024}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (CPUINFO, "Chip: 9, cpu family 6, model 85"),
        ("processor : 0\nCPU part : 0xd0c\n", "0xd0c"),
        ("processor : ARM\n", "ARM"),
    ],
)
def test_the_name_of_a_processor(files, text, name):
    files["/proc/cpuinfo"] = text
    assert linux.cpu_model.__wrapped__() == name


def test_settings_are_the_active_choices(monkeypatch, tmp_path):
    chosen = {"aslr": "2\n", "transparent_hugepage": "always [madvise] never\n"}
    named = {name: write(tmp_path / name, text) for name, text in chosen.items()}
    monkeypatch.setattr(linux, "SETTING_FILES", {**named, "smt": tmp_path / "none"})
    assert linux.facts()["settings"] == {"aslr": "2", "transparent_hugepage": "madvise"}


def test_devices_are_named_in_order(monkeypatch):
    texts = {"b": "Model: B 2\nIRQ: 5\n", "a": "Bus: 1\nModel: \t A: 1\n"}
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(name) for name in texts])
    monkeypatch.setattr(Path, "read_text", lambda self: texts[self.name])
    assert linux.facts()["accelerator"] == "A: 1, B 2"
    texts.clear()
    assert "accelerator" not in linux.facts()


def test_compressed_memory_is_that_of_zram_and_zswap(files, tmp_path):
    files["/proc/meminfo"] = "MemTotal: 100 kB\nZswap: 2 kB\n"
    assert linux.compressed_memory(tmp_path) == {"compressed_bytes": 2048}
    files["/proc/meminfo"] = "MemTotal: 100 kB\n"
    assert linux.compressed_memory(tmp_path) == {}
    for name, text in (("zram0", "900 100 4096 0 5 0 0"), ("zram1", "broken")):
        (tmp_path / name).mkdir()
        files[str(tmp_path / name / "mm_stat")] = text
        (tmp_path / name / "mm_stat").touch()
    assert linux.compressed_memory(tmp_path) == {"compressed_bytes": 4096}


def test_a_process_counts_with_its_descendants(files):
    files["/proc/7/status"] = STATUS
    files["/proc/8/status"] = "VmRSS: 30 kB\nVmSwap: 1 kB\n"
    assert linux.process_memory(7) == {"rss_bytes": 100 * 1024, "swap_bytes": 6 * 1024}
    files["/proc/9/status"] = "Name: zombie\n"
    assert linux.process_memory(7) == {"rss_bytes": 100 * 1024, "swap_bytes": 6 * 1024}
    for pid in (9, os.getpid()):
        with pytest.raises(OSError, match=r"no memory|status"):
            linux.process_memory(None if pid != 9 else pid)
    assert linux.peak_rss() == 90 * 1024
    files["/proc/7/stat"] = "7 (a) b" + TIMES
    files["/proc/8/stat"] = "8 (x" + TIMES
    assert linux.process_cpu_s(8) == (111 + 112 + 113 + 114) / 10
    assert linux.process_cpu_s(7) == 90.0 and linux.process_cpu_s(9) == 0.0
