"""The doctor: it measures in a process of its own, and its rules name what is wrong."""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.doctor import __main__ as doctor
from labkit.doctor import detectable_effect, machine_caveats, measurement_process, terminal_screen
from labkit.experiment import Interrupted, doctor_noise
from labkit.experiment.doctor_noise import PilotNoise
from labkit.machine import memory_profile
from labkit.machine.memory_profile import GIB, MemoryProfile
from labkit.records import CaseRecord, Metric, Record

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
SIGHT = PilotNoise(5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=2.0, separate_s=1.5)
MAC = {"os": "Darwin", "settings": {}, "thermal": "nominal", "low_power_mode": False}
LINUX = {"os": "Linux", "settings": {"governor": "performance", "numa_nodes": "0"}}


def facts(environment=LINUX, *, noise=None, mlx=None, free=20 * GIB, shares=None, **others):
    measured = {**json.loads(json.dumps(QUIET)), **(shares or {})}
    measured["noise"].update(noise or {})
    measured["mlx"].update(mlx or {})
    machine = MemoryProfile("a test's", 32 * GIB, free, 32 * GIB, metal=False)
    return machine_caveats.Facts(environment, machine, measured, **others)


@pytest.mark.parametrize("environment", [LINUX, MAC])
def test_a_quiet_machine_has_no_weakness(environment):
    quiet = facts(environment, on_battery=False)
    assert machine_caveats.find(quiet) == []


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
    (found,) = machine_caveats.find(facts(**change))
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
    (found,) = machine_caveats.find(facts(environment))
    assert found.fix == command


def test_the_gravest_comes_first():
    found = machine_caveats.find(facts(noise={"matmul_cv_pct": 9.0}, mlx={"metal": False}))
    assert "varies by 9.0 %" in found[0].what and "Metal" in found[-1].what


def test_a_macs_lines():
    """What a Mac tells, as its screen says it."""
    told = {
        **MAC,
        "pressure": {"memory": {"level": 2}},
        "compressed_bytes": 6 * GIB,
        "thermal": "fair",
    }
    measured = {**QUIET, "mlx": {**QUIET["mlx"], "gpu_gb_s": 150.0}}
    machine = memory_profile.simulated_mac("sim_m1_pro_32gb")
    lines = dict(terminal_screen.machine_lines(machine_caveats.Facts(told, machine, measured)))
    assert "pressure warning; 6.0 GiB compressed" in lines["memory"]
    assert "Metal recommends 21.3 GiB" in lines["memory"]
    assert "collector on" in lines["wired"] and "thermal: fair" in lines["power"]
    assert lines["bandwidth"].startswith("150.0 GB/s") and lines["MLX"].endswith("Metal")


# --------------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    """A lock of the test's own: other tests on this host may be timing studies."""
    from labkit.experiment import file_locks

    monkeypatch.setattr(file_locks, "lock_path", lambda device="cpu": tmp_path / "lock")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Folders of the test's own, and nothing tried in them."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def seen(monkeypatch, no_cache):
    """What the processes showed, without any; kept in a cache of the test's own."""
    kinds = {"kernels": SIGHT, "requests": "crashed: load: ImportError: no mlx"}
    monkeypatch.setattr(detectable_effect, "look", lambda on_step: kinds)


@pytest.fixture(scope="module")
def measured():
    """A real, short measurement, and the steps that it said."""
    steps = []
    return measurement_process.measure(steps.append, seconds=0.3), steps


def test_it_measures_in_another_process(measured):
    result, steps = measured
    assert len(steps) == 4 and "noise" in steps[1]
    assert result["mlx"]["gflop_s"] > 0 and result["bandwidth"]["gb_s"] > 0
    assert result["noise"]["matmul_cv_pct"] > 0 and result["noise"]["windows"] == 16
    assert result["noise"]["seconds"] >= 0.3


def test_one_screen_of_80_columns(measured, seen, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 50
    for word in ("chip", "memory", "MLX", "matmul", "bandwidth", "wired", "power", "noise"):
        assert re.search(rf"^ *{word}  ", out, re.MULTILINE), word
    assert "GFLOP/s" in out and "GB/s" in out and "budgets" in out


def test_it_says_what_a_minute_sees_and_keeps_it(measured, seen, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    assert doctor.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"kernels {SIGHT.interleaved_pct:.1f} % {SIGHT.separate_pct:.1f} % " in out
    assert "5 short processes of kernels (2.0 s each)" in out and "estimated" in out
    assert "sees of requests is not known: crashed: load: ImportError: no mlx" in out
    assert doctor_noise.load_pilot_noise("kernels") == SIGHT
    assert (
        doctor_noise.load_pilot_noise("requests") is None
        and doctor_noise.load_noise_sd() is not None
    )


def test_a_minute_that_is_too_short_for_a_verdict_says_so(capsys):
    slow = PilotNoise(3, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=11.0, separate_s=6.0)
    terminal_screen.show_sights(doctor._console(sys.stdout), {"kernels": slow})
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
        raise measurement_process.CannotMeasure("the measuring process failed: boom")

    monkeypatch.setattr(doctor, "measure", fail)
    assert doctor.main([]) == 1
    assert "labkit.doctor: the measuring process failed: boom" in capsys.readouterr().err


def test_a_study_that_is_timing_is_not_disturbed(monkeypatch, capsys):
    from labkit.experiment import file_locks

    monkeypatch.setattr(doctor, "PATIENCE_S", 0.0)
    monkeypatch.setattr(doctor, "measure", lambda on_step: pytest.fail("it measured"))
    with file_locks.timing_lock("outputs/a_study"):
        assert doctor.main([]) == 1
    _, waiting, line = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting: outputs/a_study")
    assert "outputs/a_study" in line and "would disturb it" in line


def test_a_process_that_hangs_is_ended():
    with pytest.raises(measurement_process.CannotMeasure, match="status -9"):
        measurement_process.measure(lambda step: None, seconds=60, timeout=1.0)


def test_a_process_that_fails_says_its_last_line():
    with pytest.raises(measurement_process.CannotMeasure, match="ValueError"):
        measurement_process.measure(lambda step: None, seconds="no number")


@pytest.mark.slow
def test_the_whole_command():
    done = subprocess.run(
        [sys.executable, "-m", "labkit.doctor"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert memory_profile.THIS_MACHINE in done.stdout and "GFLOP/s" in done.stdout
    assert re.search(r"^ *kernels +[0-9.]+ % ", done.stdout, re.MULTILINE), done.stdout
    assert done.stderr.strip() == f"labkit doctor: {doctor.TAKES}"


# --------------------------------------------------------------------------- what a minute sees


def block(number, base, control, turns=(0.5, 0.4)):
    """One process of two equal arms: their repeats (us), and the seconds of their turns."""

    def record(role, position, repeats, seconds):
        metric = Metric("dispatch_us", "us", "lower", True, tuple(repeats))
        cases = (CaseRecord("one", None, (metric,), None, {}),)
        when, spent = "2026-11-22T09:00:00Z", {"turns": seconds}
        return Record(role, role, number, position, 0, "ok", when, cases=cases, seconds=spent)

    return [record("baseline", 0, base, turns[0]), record("control", 1, control, turns[1])]


def test_turns_take_away_what_processes_differ_in():
    """Processes 10 % apart, in each of which the control is 0 or 2 % slower."""
    records, slow, apart = [], (1.0, 1.1, 1.2, 1.1), (1.0, 1.02, 1.0, 1.02)
    for number, (machine, control) in enumerate(zip(slow, apart, strict=True)):
        rounds = [100 * machine, 300 * machine, 200 * machine]
        records += block(number, rounds, [r * control for r in rounds])
    found = detectable_effect.estimate(records, [2.0, 2.0, 3.0, 1.0])
    assert (found.processes, found.interleaved_s, found.separate_s) == (4, 2.0, pytest.approx(1.6))
    paired = math.log(1.02) / math.sqrt(3)  # of 0, 1, 0, 1
    assert found.interleaved_sd == pytest.approx(paired / math.sqrt(2))
    assert 0.06 < found.separate_sd < 0.09 and found.separate_sd > 5 * found.interleaved_sd


class FakeTrial:
    """A kind of workload that takes so long, or breaks where it is told."""

    made: list["FakeTrial"]
    breaks: dict[str, BaseException]
    seconds = 0.0

    def __init__(self, overrides, folder):
        self.kind, self.ran = folder.name, 0
        folder.mkdir()
        self.strike("prepare")
        type(self).made.append(self)

    def strike(self, where):
        if f"{where} {self.kind}" in self.breaks:
            raise self.breaks[f"{where} {self.kind}"]

    def fits(self, seconds):
        return self.seconds <= seconds

    def run(self):
        self.strike("run")
        self.ran += 1

    def sight(self):
        return SIGHT


@pytest.fixture
def trials(monkeypatch):
    monkeypatch.setattr(FakeTrial, "made", [], raising=False)
    monkeypatch.setattr(FakeTrial, "breaks", {}, raising=False)
    monkeypatch.setattr(detectable_effect, "Trial", FakeTrial)
    return FakeTrial


def test_every_kind_gets_its_processes_and_says_so(trials):
    steps = []
    assert detectable_effect.look(steps.append) == {"kernels": SIGHT, "requests": SIGHT}
    assert [trial.ran for trial in trials.made] == [detectable_effect.MOST] * 2
    assert sum("process" in step for step in steps) == 2 * detectable_effect.MOST
    assert any("kernels" in step for step in steps) and any("requests" in step for step in steps)


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_a_kind_that_breaks_is_said_and_the_other_goes_on(trials, where):
    trials.breaks[f"{where} kernels"] = ImportError("no numba\nhere")
    found = detectable_effect.look(lambda step: None)
    assert found == {"kernels": "no numba here", "requests": SIGHT}
    assert trials.made[-1].ran == detectable_effect.MOST


def test_no_process_begins_that_would_end_too_late(trials, monkeypatch):
    monkeypatch.setattr(trials, "seconds", 1e9)
    detectable_effect.look(lambda step: None, seconds=60.0)
    assert [trial.ran for trial in trials.made] == [0, 0]


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_control_c_ends_it_and_leaves_nothing(trials, where, measured, monkeypatch, no_cache):
    trials.breaks[f"{where} requests"] = Interrupted("SIGINT")
    monkeypatch.setattr(doctor, "measure", lambda on_step: measured[0])
    assert doctor.main([]) == 130
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert doctor_noise.load_noise_sd() is None


@pytest.fixture
def bare():
    """A trial that was never made ready."""

    def make(walls, records=()):
        trial = object.__new__(detectable_effect.Trial)
        trial.walls, trial.records = list(walls), list(records)
        return trial

    return make


def test_a_trial_goes_on_while_it_works_and_fits(bare):
    good, bad = block(0, [1.0], [1.0]), SimpleNamespace(ok=False, outcome="oom", detail="killed")
    assert bare([]).fits(0.1) and bare([2.0, 1.0], good).fits(2.1)
    assert not bare([2.0, 1.0], good).fits(1.9) and not bare([]).fits(-0.1)
    assert not bare([1.0], [bad]).fits(60.0)
    assert bare([1.0] * 5, [bad]).sight() == "oom: killed"


def test_too_few_processes_are_not_estimated_from(bare):
    records = [r for n in range(3) for r in block(n, [100.0 + n], [100.0])]
    assert "only 2 of 3 processes" in bare([1.0] * 2, records[:4]).sight()
    assert isinstance(bare([1.0] * 3, records).sight(), PilotNoise)


def test_a_trial_is_a_study_s_own_process(tmp_path):
    """Real: two equal arms, which take turns in one worker."""
    trial = detectable_effect.Trial(detectable_effect.ASKED["kernels"], tmp_path / "kernels")
    trial.run()
    assert trial.failed is None and len(trial.walls) == 1
    assert [record.role for record in trial.records] != [] and len(trial.records) == 2
    for record in trial.records:
        assert record.block == 0 and record.notes["isolation"] == "in_process"
        assert 0 < record.seconds["turns"] < trial.walls[0]
        assert len(record.cases[0].metrics[0].repeats) == 40


@pytest.mark.slow
def test_both_kinds_for_real():
    found = detectable_effect.look(lambda step: None, seconds=120.0)
    for one in found.values():
        assert isinstance(one, PilotNoise), found
        assert one.processes == detectable_effect.MOST and one.separate_s < one.interleaved_s
