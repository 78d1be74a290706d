"""The doctor: measurement in a separate process, caveats with fixes, and pilot A/A runs."""

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import psutil
import pytest
from rich.console import Console

from labkit.config import ConfigError
from labkit.cpu import roofline_peaks, speed_probe
from labkit.doctor import __main__ as doctor
from labkit.doctor import (
    engine_profile,
    machine_caveats,
    measurement_launcher,
    measurement_worker,
    noise_pilots,
    terminal_screen,
)
from labkit.engine.user_classes import UserClassError
from labkit.experiment import Interrupted
from labkit.experiment.schedule import doctor_noise_cache
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.machine import worker_environment
from labkit.machine.cache_entries import CacheError
from labkit.machine.facts import memory_capacity
from labkit.machine.facts.memory_capacity import GIB, MemoryProfile
from labkit.machine.facts.simulated_macs import simulated_mac
from labkit.machine.facts.wired_advice import WiredAdvice
from labkit.metal.gpu_properties import EMULATED
from labkit.records import CaseRecord, Metric, Record

QUIET = {
    "others_pct": 1.0,
    "steal_pct": 0.0,
    "noise": {"matmul_cv_pct": 0.5, "bandwidth_cv_pct": 1.0, "windows": 16, "seconds": 8.0},
    "bandwidth": {"gb_s": 20.0, "mib": 256},
    "scaling": [
        {"threads": 1, "gb_s": 12.0, "matmul_us": 800.0},
        {"threads": 2, "gb_s": 18.0, "matmul_us": 410.0},
        {"threads": 3, "gb_s": 20.0, "matmul_us": 400.0},
    ],
    "mlx": {
        "version": "0.32.4",
        "metal": True,
        "cuda": False,
        "blas": {"name": "accelerate", "version": None, "core": None, "threads": None},
        "blas_reason": None,
        "gflop_s": 900.0,
        "side": 768,
    },
}
SAME_SPEED = [
    {"threads": 8, "gb_s": 20.0, "matmul_us": 100.0},
    {"threads": 16, "gb_s": 21.0, "matmul_us": 95.0},
]
ESTIMATE = PilotNoise(5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=2.0, separate_s=1.5)
MAC = {"os": "Darwin", "settings": {}, "thermal": "nominal", "low_power_mode": False}
LINUX = {"os": "Linux", "settings": {"governor": "performance", "numa_nodes": "0"}}


def facts(environment=LINUX, *, noise=None, mlx=None, free=20 * GIB, shares=None, **others):
    measured = {**json.loads(json.dumps(QUIET)), **(shares or {})}
    measured["noise"].update(noise or {})
    measured["mlx"] = None if mlx is False else measured["mlx"] | (mlx or {})
    machine = MemoryProfile("a test's", 32 * GIB, free, 32 * GIB, metal=False)
    return machine_caveats.MachineFacts(environment, machine, measured, **others)


def by_threads(**of_all):
    return {"shares": {"scaling": [SAME_SPEED[0], SAME_SPEED[1] | of_all]}}


@pytest.mark.parametrize("environment", [LINUX, MAC])
def test_a_quiet_machine_has_no_caveats(environment):
    quiet = facts(environment, on_battery=False)
    assert machine_caveats.find_caveats(quiet) == []


@pytest.mark.parametrize(
    ("change", "text", "fix"),
    [
        ({"noise": {"bandwidth_cv_pct": 3.0}}, "varies by 3.0 %", "design=strict"),
        ({"shares": {"others_pct": 30.0}}, "took 30 % of the cores", "stop them"),
        ({"shares": {"steal_pct": 4.0}}, "virtual machines took 4 %", "dedicated host"),
        ({"shares": {"scaling": SAME_SPEED}}, "16 threads are hardly", "engine.threads=8"),
        ({"free": GIB}, "only 1.0 GiB", "close programs"),
        ({"on_battery": True}, "battery", "plug it in"),
        ({"mlx": {"metal": False}}, "there is no Metal here", "on a Mac"),
        ({"mlx": False}, "there is no Metal here", "on a Mac"),
        ({"mlx": {"blas_reason": "patchelf is not installed"}}, "reference BLAS", "patchelf"),
        ({"environment": {**MAC, "low_power_mode": True}}, "low power", "System Settings"),
        ({"environment": {**MAC, "thermal": "serious"}}, "serious", "cool down"),
        ({"environment": {**LINUX, "settings": {}}}, "cannot be read", "A/A control"),
        ({"environment": {**LINUX, "swap": {"used_bytes": GIB}}}, "swapped out", "close"),
        ({"environment": {**LINUX, "cgroup": {"cores": 1.5}}}, "quota of 1.5", "cpuset"),
    ],
)
def test_each_caveat_has_its_fix(change, text, fix):
    (caveat,) = machine_caveats.find_caveats(facts(**change))
    assert text in caveat.text and fix in caveat.fix


@pytest.mark.parametrize(
    ("setting", "command"),
    [
        ({"governor": "powersave"}, "sudo cpupower frequency-set -g performance"),
        ({"boost": "1"}, "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost"),
        ({"no_turbo": "0"}, "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"),
        ({"numa_nodes": "0-1"}, "numactl --cpunodebind=0 --membind=0 python -m labkit ..."),
    ],
)
def test_settings_come_with_the_command_that_changes_them(setting, command):
    environment = {**LINUX, "settings": {**LINUX["settings"], **setting}}
    (caveat,) = machine_caveats.find_caveats(facts(environment))
    assert caveat.fix == command


@pytest.mark.parametrize(
    ("at_limit", "beyond"),
    [
        ({"noise": {"matmul_cv_pct": 2.0}}, {"noise": {"matmul_cv_pct": 2.01}}),
        ({"shares": {"others_pct": 5.0}}, {"shares": {"others_pct": 5.01}}),
        ({"shares": {"steal_pct": 1.0}}, {"shares": {"steal_pct": 1.01}}),
        ({"shares": {"steal_pct": None}}, {"shares": {"steal_pct": 2.0}}),
        (by_threads(gb_s=22.0), by_threads(gb_s=21.9)),
        (by_threads(matmul_us=90.0), by_threads(matmul_us=91.0)),
        ({"shares": {"scaling": SAME_SPEED[1:]}}, by_threads()),
        ({"free": 2 * GIB}, {"free": 2 * GIB - 1}),
        (
            {"environment": {**LINUX, "swap": {"used_bytes": GIB // 4 - 1}}},
            {"environment": {**LINUX, "swap": {"used_bytes": GIB // 4}}},
        ),
    ],
)
def test_a_caveat_begins_beyond_its_limit(at_limit, beyond):
    assert machine_caveats.find_caveats(facts(**at_limit)) == []
    assert len(machine_caveats.find_caveats(facts(**beyond))) == 1


def test_the_gravest_caveat_comes_first():
    caveats = machine_caveats.find_caveats(
        facts(noise={"matmul_cv_pct": 9.0}, mlx={"metal": False})
    )
    assert "varies by 9.0 %" in caveats[0].text and "Metal" in caveats[-1].text


def test_lines_of_a_mac():
    environment = {
        **MAC,
        "pressure": {"memory": {"level": 2}},
        "compressed_bytes": 6 * GIB,
        "thermal": "fair",
    }
    measured = {**QUIET, "mlx": {**QUIET["mlx"], "gpu_gb_s": 150.0}}
    machine = simulated_mac("sim_m1_pro_32gb")
    lines = dict(
        terminal_screen.machine_lines(machine_caveats.MachineFacts(environment, machine, measured))
    )
    assert "pressure warning; 6.0 GiB compressed" in lines["memory"]
    assert "Metal recommends 21.3 GiB" in lines["memory"]
    assert "collector on" in lines["wired"] and "thermal: fair" in lines["power"]
    assert lines["bandwidth"].startswith("150.0 GB/s") and lines["MLX"].endswith("Metal")


CONTAINER = {
    "os": "Linux",
    "os_release": "6.1",
    "cpu_model": "Xeon",
    "accelerator": "H100",
    "cores": 8,
    "cores_usable": 2,
    "cgroup": {"memory_bytes": GIB},
    "swap": {"used_bytes": GIB // 2},
    "pressure": {"memory": {"avg10": 0.5}},
    "settings": {"governor": "powersave", "boost": "1", "no_turbo": "0"},
    "thermal": {"throttled": 1},
    "mhz": 2345.6,
}


@pytest.mark.parametrize(
    ("environment", "on_battery", "expected"),
    [
        (
            CONTAINER,
            True,
            (
                "Xeon; 2 of 8 cores usable; H100; Linux 6.1",
                "32.0 GiB RAM, 20.0 GiB free (the container's limit); 0.5 GiB swapped; "
                "pressure 0.5 %",
                "on battery; governor powersave; boost 1; no_turbo 0; "
                "thermal: throttled 1 time since boot; 2,346 MHz",
            ),
        ),
        (
            {"architecture": "arm64", "cores": 4, "cores_usable": 4, "swap": {"used_bytes": 0}},
            False,
            (
                "arm64; 4 cores; ",
                "32.0 GiB RAM, 20.0 GiB free; nothing swapped",
                "on mains; governor unknown; thermal: unknown",
            ),
        ),
        (
            {"pressure": {"memory": {"level": 3}}, "compressed_bytes": 2 * GIB},
            None,
            (
                "unknown; None cores; ",
                "32.0 GiB RAM, 20.0 GiB free; nothing swapped; pressure 3; 2.0 GiB compressed",
                "no battery; governor unknown; thermal: unknown",
            ),
        ),
    ],
)
def test_lines_say_what_is_known(environment, on_battery, expected):
    lines = dict(terminal_screen.machine_lines(facts(environment, on_battery=on_battery)))
    assert (lines["chip"], lines["memory"], lines["power"]) == expected
    noise = "matmul 0.5 %, reading 1.0 % (variation over 16 equal windows in 8 s); "
    assert lines["noise"] == noise + "other programs took 1 % of the cores"
    assert lines["wired"].startswith("not a Mac")


def test_the_library_and_the_bandwidth_without_a_gpu():
    library = {"name": "stock", "version": "OpenBLAS 0.3", "core": "Zen", "threads": 2}
    cpu = facts(mlx={"metal": False, "blas": library})
    lines = dict(terminal_screen.machine_lines(cpu))
    text = "OpenBLAS 0.3 Zen, 2 threads: 900 GFLOP/s (float32, 768 wide)"
    assert (lines["matmul"], lines["bandwidth"]) == (text, "20.0 GB/s (reading 256 MiB)")
    two, three = "2 threads: products 2.0, reading 1.5", "3 threads: products 2.0, reading 1.7"
    assert lines["scaling"] == f"{two}; {three} times one thread"
    assert "scaling" not in dict(
        terminal_screen.machine_lines(facts(shares={"scaling": SAME_SPEED[:1]}))
    )


@pytest.mark.parametrize(
    ("limit_mb", "collector", "text"),
    [(None, None, "unknown, collector unknown"), (0, False, "0 (the default), collector off"),
     (1, True, "1 MiB, collector on")],
)  # fmt: skip
def test_wired_settings_are_shown(limit_mb, collector, text):
    machine = simulated_mac("sim_m1_8gb")
    wired = memory_capacity.WiredSettings(limit_mb, collector, None)
    machine = dataclasses.replace(machine, wired=wired)
    line = f"iogpu.wired_limit_mb {text}, dynamic low-water mark unknown"
    mac = machine_caveats.MachineFacts(MAC, machine, QUIET)
    assert dict(terminal_screen.machine_lines(mac))["wired"] == line


def test_items_are_numbered_with_their_remedies(capsys):
    console = doctor._console(sys.stdout)
    found = [machine_caveats.MachineCaveat(f"text {i}", f"fix {i}") for i in (1, 2)]
    terminal_screen.show_caveats(console, found)
    terminal_screen.show_caveats(console, [])
    terminal_screen.show_advice(console, ())
    terminal_screen.show_advice(console, (WiredAdvice("found", "run", "harm"),))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:5] == ["1.  text 1", "> fix 1", "2.  text 2", "> fix 2"]
    assert lines[5].startswith("No caveats") and lines[6].startswith("Wired memory")
    assert lines[7:] == ["1.  found", "> run", "risk: harm"]


# --------------------------------------------------------------------------- the measurement


class Clock:
    """A clock that moves a second with each reading, and a probe of known times."""

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def read(self):
        self.now += 1.0
        return self.now

    def time(self):
        self.calls += 1
        return {"matmul_us": 100.0 + self.calls % 2, "bandwidth_us": 50.0 * (1 + self.calls % 2)}


def test_noise_is_the_variation_of_the_windows_medians(monkeypatch):
    """A reading a second, windows of a second: one sample each, which alternate."""
    clock = Clock()
    monkeypatch.setattr(speed_probe, "SpeedProbe", lambda cores: clock)
    monkeypatch.setattr(measurement_worker, "time", SimpleNamespace(monotonic=clock.read))
    found = measurement_worker.noise(float(measurement_worker.NOISE_WINDOWS))
    half, odd = measurement_worker.NOISE_WINDOWS / 2, math.sqrt(16 / 15)
    assert (found["windows"], clock.calls) == (16, 17) and half == 8
    assert found["matmul_cv_pct"] == pytest.approx(100 * 0.5 * odd / 100.5)
    assert found["bandwidth_cv_pct"] == pytest.approx(100 * 25 * odd / 75)
    assert found["seconds"] == clock.now - 1


@pytest.mark.parametrize(
    ("free", "size", "cores", "counts"),
    [
        (8 * ((3 << 20) + 5000), (3 << 20) + 4096, 1, [1]),
        (64 * GIB, 256 << 20, 12, [1, 2, 4, 8, 12]),
        (64 * GIB, 256 << 20, 16, [1, 2, 4, 8, 16]),
    ],
)
def test_an_eighth_of_the_free_memory_is_read_by_ever_more_threads(
    monkeypatch, free, size, cores, counts
):
    read = []
    monkeypatch.setattr(np, "ones", lambda count, dtype: SimpleNamespace(nbytes=4 * count))
    monkeypatch.setattr(memory_capacity, "this_machine", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(
        roofline_peaks, "read_gb_per_s", lambda stream, _: read.append(stream.nbytes) or 7.0
    )
    probe = SimpleNamespace(time=lambda: {"matmul_us": 5.0})
    monkeypatch.setattr(speed_probe, "SpeedProbe", lambda threads: probe)
    monkeypatch.setattr(worker_environment, "core_count", lambda: cores)
    used = []
    monkeypatch.setattr(numba, "set_num_threads", used.append)
    found = measurement_worker.cpu_rates()
    assert found["bandwidth"] == {"gb_s": 7.0, "mib": size >> 20}
    assert read == [size] * len(counts)
    assert used == counts == [each["threads"] for each in found["scaling"]]


@pytest.mark.parametrize(("cost", "calls"), [(0.05, 7), (0.5, 4)])
def test_a_timing_is_the_median_after_a_warm_up(monkeypatch, cost, calls):
    """Of 0.6 s, but of three calls at least."""
    done, now = [], [0.0]

    def run():
        done.append(None)
        now[0] += cost * (100 if len(done) == 1 else 1 + len(done) % 3)

    monkeypatch.setattr(measurement_worker, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert measurement_worker._median_s(run) == pytest.approx(2 * cost)
    assert len(done) == calls


# --------------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A temporary folder of the test's own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def stub_pilots(monkeypatch, no_cache):
    """Results of pilots without running any, and a cache of the test's own."""
    results = {"kernels": ESTIMATE, "requests": "crashed: load: ImportError: no mlx"}
    monkeypatch.setattr(noise_pilots, "run_pilots", lambda on_step: results)


@pytest.fixture(scope="module")
def measured():
    """A real, short measurement, and the steps that it reported."""
    steps = []
    return measurement_launcher.measure(steps.append, noise_s=0.3), steps


def test_it_measures_in_another_process(measured):
    result, steps = measured
    assert len(steps) == 4 and "noise" in steps[1]
    assert result["mlx"]["gflop_s"] > 0 and result["bandwidth"]["gb_s"] > 0
    assert result["noise"]["matmul_cv_pct"] > 0 and result["noise"]["windows"] == 16
    assert result["noise"]["seconds"] >= 0.3


def test_one_screen_of_80_columns(measured, stub_pilots, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 50
    for label in ("chip", "memory", "MLX", "matmul", "bandwidth", "wired", "power", "noise"):
        assert re.search(rf"^ *{label}  ", out, re.MULTILINE), label
    assert "GFLOP/s" in out and "GB/s" in out and "budgets" in out
    assert len(re.findall(r"^(?:No caveats|Caveats): ", out, re.MULTILINE)) == 1


def test_detectable_effects_are_shown_and_stored(measured, stub_pilots, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    assert doctor.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"kernels {ESTIMATE.interleaved_pct:.1f} % {ESTIMATE.separate_pct:.1f} % " in out
    assert (
        "5 short processes of kernels (2.0 s each)" in out
        and "(estimated)" in out
        and "80 % power" in out
    )
    assert "effect for requests is unknown: crashed: load: ImportError: no mlx" in out
    assert doctor_noise_cache.load_pilot_noise("kernels") == ESTIMATE
    assert (
        doctor_noise_cache.load_pilot_noise("requests") is None
        and doctor_noise_cache.load_noise_sd() is not None
    )


def test_too_few_blocks_in_a_minute_are_reported(capsys):
    slow = PilotNoise(3, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=11.0, separate_s=6.0)
    terminal_screen.show_pilots(doctor._console(sys.stdout), {"kernels": slow})
    assert capsys.readouterr().out.count("too few blocks") == 2


def test_the_parent_does_not_import_mlx_or_numba():
    code = (
        "import sys\n"
        "from labkit.doctor.__main__ import main\n"
        "assert main(['--machine', 'sim_m1_8gb']) == 0\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'mlx', 'mlx_lm', 'numba'}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_simulated_mac_shows_budgets_and_advice(capsys):
    assert doctor.main(["--machine", "sim_m1_pro_32gb"]) == 0
    out = capsys.readouterr().out
    assert "set engine.budget.fraction=0.75 or less" in out
    assert "mistralrs: 19.2 GiB before weights (60 % of RAM)" in out
    assert "sudo sysctl iogpu.wired_limit_mb=29492" in out
    assert "sudo sysctl iogpu.disable_wired_collector=1" in out
    assert "reboot" in out


def test_a_smaller_fraction_needs_no_higher_limit(capsys):
    assert doctor.main(["--machine", "sim_m1_pro_32gb", "--fraction", "1"]) == 0
    capsys.readouterr()
    assert doctor.main(["--machine", "sim_m1_pro_32gb", "--fraction", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "fraction: 16.0 GiB before weights (50 % of RAM)" in out
    assert "wired_limit_mb=" not in out.replace("iogpu.wired_limit_mb 0", "")


def test_other_programs_took_what_is_not_the_doctor_s_own(monkeypatch):
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    before = {"busy": 10.0, "own": 2.0, "stolen": 1.0}
    after = {"busy": 30.0, "own": 6.0, "stolen": 2.0}
    assert doctor._shares(before, after, 10.0) == {"others_pct": 40.0, "steal_pct": 2.5}
    del before["stolen"]
    after["own"] = 30.0  # clocks of the process and of the system differ
    assert doctor._shares(before, after, 10.0) == {"others_pct": 0.0, "steal_pct": None}
    del before["busy"]  # where /proc/stat cannot be read
    assert doctor._shares(before, after, 10.0) == {"others_pct": None, "steal_pct": None}
    assert doctor._shares(after, before, 10.0) == {"others_pct": None, "steal_pct": None}
    unknown = facts(shares={"others_pct": None, "steal_pct": None})
    assert "other programs" not in dict(terminal_screen.machine_lines(unknown))["noise"]
    assert not any("other programs" in one.text for one in machine_caveats.find_caveats(unknown))


@pytest.mark.parametrize(("plugged", "on_battery"), [(True, False), (False, True), (None, None)])
def test_the_battery_is_one_of_the_facts(monkeypatch, plugged, on_battery):
    battery = None if plugged is None else SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    monkeypatch.setattr(doctor, "_measure_with_progress", lambda: (QUIET, {"kernels": ESTIMATE}))
    monkeypatch.setattr(doctor.machine_snapshot, "take", lambda: LINUX)
    found = doctor._measure_facts()
    assert (found.on_battery, found.environment, found.measured) == (on_battery, LINUX, QUIET)
    assert found.pilots == {"kernels": ESTIMATE} and not found.machine.is_simulated


@pytest.mark.parametrize(
    "arguments",
    [
        ["--machine", "toaster"],
        *(["--fraction", text] for text in ("1.01", "x", "0")),
        ["--engine", "paged", "--fraction", "0.5"],
        ["nope"],
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("labkit.doctor: ")


def test_a_failed_measurement_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def fail(on_step):
        raise measurement_launcher.MeasurementError("the measuring process failed: boom")

    monkeypatch.setattr(doctor, "measure", fail)
    assert doctor.main([]) == 1
    assert "labkit.doctor: the measuring process failed: boom" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [CacheError("LABKIT_CACHE=/x: cannot be written"), UserClassError("it failed", "a:B")]
)
def test_a_cache_or_a_class_that_fails_is_one_line_and_exit_code_2(monkeypatch, capsys, error):
    def fail(on_step):
        raise error

    monkeypatch.setattr(doctor, "measure", fail)
    assert doctor.main([]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"labkit.doctor: {error}"


def test_a_running_study_is_not_disturbed(monkeypatch, capsys):
    from labkit.experiment.schedule.timing_lock import timing_lock

    monkeypatch.setattr(doctor, "LOCK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(doctor, "measure", lambda on_step: pytest.fail("it measured"))
    with timing_lock("outputs/a_study"):
        assert doctor.main([]) == 1
    _, waiting, line = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting: outputs/a_study")
    assert "outputs/a_study" in line and "would disturb it" in line


def test_a_hanging_process_is_killed():
    message = r"^no result within 0.2 s; the machine is busy$"
    with pytest.raises(measurement_launcher.MeasurementError, match=message):
        measurement_launcher.measure(lambda step: None, noise_s=60, timeout_s=0.2)


def test_lines_that_are_no_messages_are_skipped(monkeypatch, tmp_path):
    """A library of the measuring process may print."""
    lines = ["a warning", '{"step": "one"}', "another", '{"result": {"x": 1}}']
    worker = tmp_path / "python"
    worker.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    steps = []
    assert measurement_launcher.measure(steps.append) == {"x": 1}
    assert steps == ["one"]


def test_a_failed_process_reports_its_last_line():
    with pytest.raises(measurement_launcher.MeasurementError, match="ValueError"):
        measurement_launcher.measure(lambda step: None, noise_s="no number")


@pytest.mark.slow
def test_the_whole_command():
    done = subprocess.run(
        [sys.executable, "-m", "labkit.doctor"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert memory_capacity.THIS_MACHINE in done.stdout and "GFLOP/s" in done.stdout
    measured = r"^ *kernels +[0-9.]+ % |for kernels is unknown: only [012] of"  # on a busy machine
    assert re.search(measured, done.stdout, re.MULTILINE), done.stdout
    assert done.stderr.strip() == f"labkit doctor: {doctor.PROGRESS_TEXT}"


# --------------------------------------------------------------------------- pilot A/A runs


def block(number, base, control, turns=(0.5, 0.4)):
    """Records of one process with two equal arms: repeats (us), and seconds of their turns."""

    def record(role, position, repeats, seconds):
        metric = Metric("dispatch_us", "us", "lower", True, tuple(repeats))
        cases = (CaseRecord("one", None, (metric,), None, {}),)
        start, stages = "2026-11-22T09:00:00Z", {"turns": seconds}
        return Record(role, role, number, position, 0, "ok", start, cases=cases, seconds=stages)

    return [record("baseline", 0, base, turns[0]), record("control", 1, control, turns[1])]


def test_interleaving_removes_the_differences_between_processes():
    """Processes 10 % apart, in each of which the control is 0 or 2 % slower."""
    records, slow, apart = [], (1.0, 1.1, 1.2, 1.1), (1.0, 1.02, 1.0, 1.02)
    for number, (machine, control) in enumerate(zip(slow, apart, strict=True)):
        rounds = [100 * machine, 300 * machine, 200 * machine]
        records += block(number, rounds, [r * control for r in rounds])
    estimate = noise_pilots.estimate_noise(records, [2.0, 2.0, 3.0, 1.0])
    assert (estimate.processes, estimate.interleaved_s, estimate.separate_s) == (
        4,
        2.0,
        pytest.approx(1.6),
    )
    paired = math.log(1.02) / math.sqrt(3)  # of 0, 1, 0, 1
    assert estimate.interleaved_sd == pytest.approx(paired / math.sqrt(2))
    assert 0.06 < estimate.separate_sd < 0.09 and estimate.separate_sd > 5 * estimate.interleaved_sd


class FakePilot:
    """A pilot whose processes take ``seconds``, or that raises the errors in ``errors``."""

    instances: list["FakePilot"]
    errors: dict[str, BaseException]
    seconds = 0.0

    def __init__(self, overrides, folder):
        self.kind, self.num_runs = folder.name, 0
        folder.mkdir()
        self.raise_error("prepare")
        type(self).instances.append(self)

    def raise_error(self, where):
        if f"{where} {self.kind}" in self.errors:
            raise self.errors[f"{where} {self.kind}"]

    def fits(self, remaining_s):
        return self.seconds <= remaining_s

    def run(self):
        self.raise_error("run")
        self.num_runs += 1

    def estimate(self):
        return ESTIMATE


@pytest.fixture
def pilots(monkeypatch):
    monkeypatch.setattr(FakePilot, "instances", [], raising=False)
    monkeypatch.setattr(FakePilot, "errors", {}, raising=False)
    monkeypatch.setattr(noise_pilots, "Pilot", FakePilot)
    return FakePilot


def test_every_kind_runs_all_its_processes_and_reports_steps(pilots):
    steps = []
    assert noise_pilots.run_pilots(steps.append) == {"kernels": ESTIMATE, "requests": ESTIMATE}
    assert [pilot.num_runs for pilot in pilots.instances] == [noise_pilots.MAX_PROCESSES] * 2
    assert sum("process" in step for step in steps) == 2 * noise_pilots.MAX_PROCESSES
    assert any("kernels" in step for step in steps) and any("requests" in step for step in steps)


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_an_error_of_one_kind_is_reported_and_the_other_runs(pilots, where):
    pilots.errors[f"{where} kernels"] = ImportError("no numba\nhere")
    results = noise_pilots.run_pilots(lambda step: None)
    assert results == {"kernels": "no numba here", "requests": ESTIMATE}
    assert pilots.instances[-1].num_runs == noise_pilots.MAX_PROCESSES


def test_no_process_starts_that_would_end_too_late(pilots, monkeypatch):
    monkeypatch.setattr(pilots, "seconds", 1e9)
    noise_pilots.run_pilots(lambda step: None, time_limit_s=60.0)
    assert [pilot.num_runs for pilot in pilots.instances] == [0, 0]


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_control_c_leaves_no_files(pilots, where, measured, monkeypatch, no_cache):
    pilots.errors[f"{where} requests"] = Interrupted("SIGINT")
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    assert doctor.main([]) == 130
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert doctor_noise_cache.load_noise_sd() is None


@pytest.fixture
def bare():
    """Pilots that were never prepared."""

    def make(wall_times_s, records=()):
        pilot = object.__new__(noise_pilots.Pilot)
        pilot.wall_times_s, pilot.records = list(wall_times_s), list(records)
        return pilot

    return make


def test_a_pilot_continues_while_it_works_and_fits(bare):
    good, bad = block(0, [1.0], [1.0]), SimpleNamespace(ok=False, outcome="oom", detail="killed")
    assert bare([]).fits(0.1) and bare([2.0, 1.0], good).fits(2.1)
    assert not bare([2.0, 1.0], good).fits(1.9) and not bare([]).fits(-0.1)
    assert not bare([1.0], [bad]).fits(60.0)
    assert bare([1.0] * 5, [bad]).estimate() == "oom: killed"


def test_too_few_processes_give_no_estimate(bare):
    records = [r for n in range(3) for r in block(n, [100.0 + n], [100.0])]
    assert "only 2 of 3 processes" in bare([1.0] * 2, records[:4]).estimate()
    assert isinstance(bare([1.0] * 3, records).estimate(), PilotNoise)


def test_a_pilot_runs_a_study_s_own_process(tmp_path):
    """A real run: two equal arms, interleaved in one worker."""
    overrides = noise_pilots.OVERRIDES_BY_KIND["kernels"]
    pilot = noise_pilots.Pilot(overrides, tmp_path / "kernels")
    pilot.run()
    assert pilot.failure is None and len(pilot.wall_times_s) == 1
    assert [record.role for record in pilot.records] != [] and len(pilot.records) == 2
    for record in pilot.records:
        assert record.block == 0 and record.notes["isolation"] == "in_process"
        assert 0 < record.seconds["turns"] < pilot.wall_times_s[0]
        assert len(record.cases[0].metrics[0].repeats) == 40


@pytest.mark.slow
def test_both_kinds_for_real():
    results = noise_pilots.run_pilots(lambda step: None, time_limit_s=120.0)
    for estimate in results.values():
        assert isinstance(estimate, PilotNoise), results
        assert noise_pilots.MIN_PROCESSES <= estimate.processes <= noise_pilots.MAX_PROCESSES
        assert estimate.separate_s < estimate.interleaved_s


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        ({"metal": True, "cuda": False}, "on Metal"),
        ({"metal": False, "cuda": True}, "on CUDA"),
        ({"metal": False, "cuda": False}, "on the CPU; no Metal"),
    ],
)
def test_the_device_of_mlx_is_shown(gpu, text):
    sizes = {"gpu": EMULATED.text} if any(gpu.values()) else {}
    lines = dict(terminal_screen.machine_lines(facts(mlx={**gpu, **sizes})))
    assert text in lines["MLX"]
    assert lines.get("GPU") == (
        "14 GPU cores, threadgroups of up to 1,024 threads and 32 KiB, simdgroups of 32"
        if sizes
        else None
    )
    blas = lines["matmul"].split(":")[0]
    assert blas == (text.removeprefix("on ") if any(gpu.values()) else "accelerate")


HOST_PARTS = {"schedule": 0.4, "build": 0.2, "plan": 0.1, "sample": 0.2, "update": 0.1}


def profiled(host_us, *, overlap=False, padded=0.0, seed=0):
    """Records of five processes whose decode steps have this much of the host's work, and noise."""
    rng, records = np.random.default_rng(seed), []
    model = {"model": 1000.0} if overlap else {"attention": 400.0, "products": 500.0, "rest": 100.0}
    for block in range(5):
        parts = {name: share * host_us for name, share in HOST_PARTS.items()} | model
        decode = {name: 50 * us * rng.lognormal(0, 0.05) for name, us in parts.items()}
        note = {"steps": {"decode": 50, "prefill": 10}, "clocks_us": 5.0, "output_tokens": 200,
                "parts_us": {"decode": decode, "prefill": {"products": 10 * 0.1}}}  # fmt: skip
        counters = {"steps.decode": 50.0, "steps.mixed": 10.0, "steps.total": 60.0,
                    "tokens.output": 200.0, "tokens.computed": 240.0, "tokens.padded": padded,
                    "shape.new": 5.0, "shape.reused": 45.0, "shape.repeated": 40.0}  # fmt: skip
        records.append(
            Record("base", "baseline", block, 0, 0, "ok", "2026-11-20T20:00:00Z",
                   counters=counters, notes={"step_parts": note})
        )  # fmt: skip
    return records


def shown(found):
    """Return the lines that the screen shows of a profile, by their labels' first words."""
    out = io.StringIO()
    terminal_screen.show_profile(Console(file=out, width=200), "engine", found)
    return dict(line.split(None, 1) for line in out.getvalue().splitlines() if line.strip())


@pytest.mark.parametrize(
    ("host_us", "bound"),
    [(100.0, "model"), (400.0, "model"), (1000.0, "neither"), (3000.0, "host")],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_profile_is_right_on_planted_host_delays(host_us, bound, overlap):
    found = engine_profile.profile(profiled(host_us, overlap=overlap))
    share = 100 * host_us / (host_us + 1000)
    host = found.shares["host"]
    assert found.bound == bound
    assert host.pct == pytest.approx(share, rel=0.06) and host.low_pct < share < host.high_pct
    least = min(share, 100 - share)
    assert found.gains["overlap"].pct == pytest.approx(100 * least / (100 - least), rel=0.1)
    assert found.gains["attention"].pct == pytest.approx(
        0.0 if overlap else 100 / (1 / (4 / 10 * (1 - share / 100)) - 1), rel=0.1
    )
    lines = shown(found)
    assert "90 % of decode steps have a shape seen before, 80 %" in lines["shapes"]
    assert lines["bound"].startswith("not host-bound") == (bound == "model")


def test_one_process_decides_no_bound():
    lines = shown(engine_profile.profile(profiled(100.0)[:1]))
    assert lines["bound"].startswith("not decided: one process gives no interval")
    assert lines["from"].startswith("1 short process;")


def test_padding_and_buckets_are_worth_what_they_take():
    found = engine_profile.profile(profiled(1000.0, padded=60.0))
    assert found.padded_pct == 20.0 and found.tokens_per_step == 4.0
    assert found.gains["padding"].pct == pytest.approx(100 * (1 / 0.9 - 1), rel=0.1)
    assert found.gains["buckets"].pct == pytest.approx(100 * (1 / (1 - 0.2 * 0.15) - 1), rel=0.1)


def test_overrides_need_an_engine_and_steps_need_clocks(capsys, monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["model=tiny"])
    assert stop.value.code == 2 and "overrides need --engine" in capsys.readouterr().err
    pilot = SimpleNamespace(records=[], failure=None, fits=lambda s: True)
    plain = Record("base", "baseline", 0, 0, 0, "ok", "2026-11-20T20:00:00Z")
    pilot.run = lambda: pilot.records.append(plain)
    asked = []
    monkeypatch.setattr(engine_profile, "Pilot", lambda words, *_: asked.extend(words) or pilot)
    with pytest.raises(measurement_launcher.MeasurementError, match=r"^engine=mlx_lm: no clocks"):
        engine_profile.measure(["engine=mlx_lm", "workload=ragged"], tmp_path)
    assert asked == ["model=tiny", "engine=mlx_lm", "workload=ragged"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ablation=kv_layout", "ablation=kv_layout: a profile is of one engine"),
        ("++design.blocks=9", "a profile is of one engine"),
        ("experiment=seq_map_kernel", "a profile is of one engine"),
        ("out=x", "a profile is of one engine"),
        ("plan=true", "a profile is of one engine"),
        ("engine=naive,padded", "engine=naive,padded: give a single value"),
        ("engine.threads=1,2", "engine.threads=1,2: give a single value"),
        ("workload=kernel_decode", "workload=kernel_decode: it serves no requests"),
    ],
)
def test_a_profile_refuses_what_it_would_ignore(word, message, monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.workload.prepare", lambda experiment: pytest.fail("it prepares"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_profile.measure(["engine=paged", word], tmp_path)
