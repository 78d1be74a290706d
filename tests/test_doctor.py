"""The doctor: it measures in a process of its own, and its rules name what is wrong."""

import json
import re
import subprocess
import sys

import pytest

from labkit.doctor import __main__ as doctor
from labkit.doctor import child, screen, weaknesses
from labkit.platform import memory_machine
from labkit.platform.memory_machine import GIB, Machine

QUIET = {
    "others_pct": 1.0,
    "steal_pct": 0.0,
    "noise": {"matmul_cv_pct": 0.5, "bandwidth_cv_pct": 1.0, "windows": 16, "seconds": 8.0},
    "bandwidth": {"gb_s": 20.0, "mib": 256},
    "mlx": {
        "version": "0.32.4",
        "metal": True,
        "blas": {"name": "accelerate", "version": None, "core": None, "threads": None},
        "blas_reason": None,
        "gflop_s": 900.0,
        "side": 768,
    },
}
MAC = {"os": "Darwin", "settings": {}, "thermal": "nominal", "low_power_mode": False}
LINUX = {"os": "Linux", "settings": {"governor": "performance", "numa_nodes": "0"}}


def facts(environment=LINUX, *, noise=None, mlx=None, free=20 * GIB, shares=None, **others):
    measured = {**json.loads(json.dumps(QUIET)), **(shares or {})}
    measured["noise"].update(noise or {})
    measured["mlx"].update(mlx or {})
    machine = Machine("a test's", 32 * GIB, free, 32 * GIB, metal=False)
    return weaknesses.Facts(environment, machine, measured, **others)


@pytest.mark.parametrize("environment", [LINUX, MAC])
def test_a_quiet_machine_has_no_weakness(environment):
    quiet = facts(environment, on_battery=False)
    assert weaknesses.find(quiet) == []


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"noise": {"bandwidth_cv_pct": 3.0}}, "varies by 3.0 %", "design=strict"),
        ({"shares": {"others_pct": 30.0}}, "took 30 % of the cores", "end them"),
        ({"shares": {"steal_pct": 4.0}}, "virtual machines took 4 %", "dedicated host"),
        ({"free": GIB}, "only 1.0 GiB", "close programs"),
        ({"on_battery": True}, "battery", "plug it in"),
        ({"mlx": {"metal": False}}, "no Metal here", "on a Mac"),
        ({"mlx": {"blas_reason": "patchelf is not installed"}}, "reference BLAS", "patchelf"),
        ({"environment": {**MAC, "low_power_mode": True}}, "low power", "System Settings"),
        ({"environment": {**MAC, "thermal": "serious"}}, "serious", "cool down"),
        ({"environment": {**LINUX, "settings": {}}}, "cannot be read", "A/A control"),
        ({"environment": {**LINUX, "swap": {"used_bytes": GIB}}}, "swapped out", "close"),
        ({"environment": {**LINUX, "cgroup": {"cores": 1.5}}}, "quota of 1.5", "cpuset"),
    ],
)
def test_each_weakness_has_its_fix(change, what, fix):
    (found,) = weaknesses.find(facts(**change))
    assert what in found.what and fix in found.fix


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
    (found,) = weaknesses.find(facts(environment))
    assert found.fix == command


def test_the_gravest_comes_first():
    found = weaknesses.find(facts(noise={"matmul_cv_pct": 9.0}, mlx={"metal": False}))
    assert "varies by 9.0 %" in found[0].what and "Metal" in found[-1].what


def test_a_macs_lines():
    """What a Mac tells, as its screen says it."""
    told = {**MAC, "level": "warning", "compressed": 6 * GIB, "thermal": "fair"}
    measured = {**QUIET, "mlx": {**QUIET["mlx"], "gpu_gb_s": 150.0}}
    machine = memory_machine.simulated("sim_m1_pro_32gb")
    lines = dict(screen.machine_lines(weaknesses.Facts(told, machine, measured)))
    assert "pressure warning; 6.0 GiB compressed" in lines["memory"]
    assert "Metal recommends 21.3 GiB" in lines["memory"]
    assert "collector on" in lines["wired"] and "thermal: fair" in lines["power"]
    assert lines["bandwidth"].startswith("150.0 GB/s") and lines["MLX"].endswith("Metal")


# --------------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    """A lock of the test's own: other tests on this host may be timing studies."""
    from labkit.experiment import lock

    monkeypatch.setattr(lock, "lock_path", lambda device="cpu": tmp_path / "lock")


@pytest.fixture(scope="module")
def measured():
    """A real, short measurement, and the steps that it said."""
    steps = []
    return child.measure(steps.append, seconds=0.3), steps


def test_it_measures_in_another_process(measured):
    result, steps = measured
    assert len(steps) == 4 and "noise" in steps[1]
    assert result["mlx"]["gflop_s"] > 0 and result["bandwidth"]["gb_s"] > 0
    assert result["noise"]["matmul_cv_pct"] > 0 and result["noise"]["windows"] == 16
    assert result["noise"]["seconds"] >= 0.3


def test_one_screen_of_80_columns(measured, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 50
    for word in ("chip", "memory", "MLX", "matmul", "bandwidth", "wired", "power", "noise"):
        assert re.search(rf"^ *{word}  ", out, re.MULTILINE), word
    assert "GFLOP/s" in out and "GB/s" in out and "budgets" in out


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
    assert doctor.main(["--machine", "sim_m1_pro_32gb", "--fraction", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "fraction: 16.0 GiB before weights (50 % of RAM)" in out
    assert "wired_limit_mb=" not in out.replace("iogpu.wired_limit_mb 0", "")


@pytest.mark.parametrize(
    "arguments", [["--machine", "toaster"], ["--fraction", "1.5"], ["--fraction", "x"], ["nope"]]
)
def test_a_mistake_is_one_line_and_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("labkit.doctor: ")


def test_a_measurement_that_fails_is_one_line_and_1(monkeypatch, capsys):
    def fail(on_step):
        raise child.CannotMeasure("the measuring process failed: boom")

    monkeypatch.setattr(doctor, "measure", fail)
    assert doctor.main([]) == 1
    assert "labkit.doctor: the measuring process failed: boom" in capsys.readouterr().err


def test_a_study_that_is_timing_is_not_disturbed(monkeypatch, capsys):
    from labkit.experiment import lock

    monkeypatch.setattr(doctor, "PATIENCE_S", 0.0)
    monkeypatch.setattr(doctor, "measure", lambda on_step: pytest.fail("it measured"))
    with lock.timing_lock("outputs/a_study"):
        assert doctor.main([]) == 1
    _, waiting, line = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting: outputs/a_study")
    assert "outputs/a_study" in line and "would disturb it" in line


def test_a_process_that_hangs_is_ended():
    with pytest.raises(child.CannotMeasure, match="status -9"):
        child.measure(lambda step: None, seconds=60, timeout=1.0)


def test_a_process_that_fails_says_its_last_line():
    with pytest.raises(child.CannotMeasure, match="ValueError"):
        child.measure(lambda step: None, seconds="no number")


@pytest.mark.slow
def test_the_whole_command():
    done = subprocess.run(
        [sys.executable, "-m", "labkit.doctor"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert memory_machine.THIS in done.stdout and "GFLOP/s" in done.stdout
    assert done.stderr.strip() == "labkit doctor: measuring for about 12 s"
