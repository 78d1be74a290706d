"""The delays that ``benchmarks/sensitivity.py`` plants, without whole studies."""

import importlib
import json
import lzma
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from labkit.config import Isolation
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.openai import server_process
from labkit.experiment.worker.worker_run import WorkerProcess
from labkit.machine.facts import code_revision
from labkit.machine.processes import process_tree
from labkit.machine.processes.server_supervisor import SupervisedServer
from labkit.workload.arm_clocks import ArmClock
from labkit.workload.requests.interleaved_serving_arms import InterleavedServing
from labkit.workload.video.interleaved_frame_decoding import InterleavedVideo

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ENGINE = """
    import time


    class LLMEngine:
        def step(self):
            time.sleep(0.02)
            return ["event"]
"""


@pytest.fixture
def benchmark(monkeypatch):
    """Return what imports a benchmark as the command ``python benchmarks/NAME.py`` does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["live-overlap", "live-servers", "live-llamacpp"])
def test_a_live_study_has_a_planted_arm_and_a_control(benchmark, kind):
    if kind == "live-llamacpp":
        pytest.importorskip("gguf")  # the extra llamacpp
    cell = benchmark("sensitivity").with_planted(kind, ["design.blocks=8", "seed=1"])
    assert cell.isolation is Isolation.live
    assert [arm.name for arm in cell.arms] == ["base", "planted_3pct", "control"]
    assert len({repr(arm.config) for arm in cell.arms}) == 1


@pytest.mark.parametrize(
    ("workload", "isolation"),
    [
        (workload, isolation)
        for workload in ("kernels", "requests", "video", "servers")
        for isolation in (Isolation.in_process, Isolation.live, Isolation.process)
        if (workload, isolation) != ("servers", Isolation.in_process)
    ],
)
def test_a_planted_delay_is_measured_with_every_isolation(benchmark, workload, isolation):
    if workload == "video":
        pytest.importorskip("av")  # the extra video
    design = [f"design.isolation={isolation.value}", "design.blocks=8"]
    cell = benchmark("sensitivity").with_planted(f"agreement-live-{workload}", design)
    assert cell.isolation is isolation
    assert [arm.name for arm in cell.arms] == ["base", "planted_10pct", "control"]


@pytest.mark.parametrize("workload", ["kernels", "servers"])
def test_a_second_agreement_has_another_seed_and_name(benchmark, monkeypatch, tmp_path, workload):
    sensitivity, kind, cells = benchmark("sensitivity"), f"agreement-live-{workload}", []
    monkeypatch.setattr(sensitivity, "run", cells.append)
    monkeypatch.setattr(sensitivity, "summary", lambda folder: folder.name)
    names = sensitivity.live_agreement(kind, tmp_path, 9, 7, number=1)
    isolations = [i for i in sensitivity.ISOLATIONS if (workload, i) != ("servers", "in_process")]
    assert names == [f"{kind}-2-{isolation}" for isolation in isolations]
    assert [cell.dir.name for cell in cells] == names
    assert [cell.design.isolation.value for cell in cells] == isolations
    assert [cell.design.blocks for cell in cells] == [7, 9, 9][-len(isolations) :]
    assert {cell.seed for cell in cells} == {11}
    assert [arm.name for cell in cells for arm in cell.arms] == ["base", "planted_10pct"] * len(
        isolations
    )


def study_of(isolation, effect_pct, low, high, case="all"):
    comparison = {"effect_pct": effect_pct, "ci_low_pct": low, "ci_high_pct": high}
    return {
        "study": f"agreement-live-requests-{isolation}",
        "design": {"blocks": 8 if isolation == "in_process" else 30},
        "rows": [{"case": case, "comparisons": [{"arm": "planted_10pct", **comparison}]}],
    }


def test_live_sets_are_compared_with_the_other_isolations_in_every_row(benchmark):
    studies = [
        study_of("in_process", -8.0, -9.0, -7.0),
        study_of("live", -9.0, -9.5, -8.5),
        study_of("process", -9.2, None, None),
    ]
    sensitivity = benchmark("sensitivity")
    _, _, line = sensitivity.isolations_agreed(studies).splitlines()
    cells = line.strip("| ").split(" | ")
    assert cells[:5] == ["requests", "8, 30, 30", "-8.0 %", "-9.0 %", "-9.2 %"]
    assert cells[5:] == ["1.1 % (1.2 %)", "-"]
    _, _, line = sensitivity.isolations_agreed([study_of("live", 9, 8, 10, "decode")]).splitlines()
    assert line == "| decode | -, 30, - | - | +9.0 % | - | - | - |"
    assert sensitivity.table(studies).count("\n") == 1  # these have no control to count


@pytest.mark.parametrize(("low", "named"), [(-0.1, False), (0.1, True)])
def test_a_delay_is_detected_at_the_level_of_the_look_that_ended_the_row(benchmark, low, named):
    """A first look spends a fifth of alpha: an adjusted p of .03 is no detection there."""
    one = {"effect_pct": 1.0, "ci_low_pct": low, "ci_high_pct": 2.0, "p_adjusted": 0.03}
    arms = ("planted_1pct", "control")
    row = {"case": "decode", "primary": True, "better": "lower"}
    row["comparisons"] = [{"arm": arm, **one} for arm in arms]
    cell = {"arms": [{"name": arm} for arm in arms], "rows": [row], "gates": {}}
    cell["design"] = {"alpha": 0.05}
    result = benchmark("sensitivity").study_result(cell)
    assert (result["named"], result["false"]) == (named, named)


def test_studies_of_llama_cpp_name_the_missing_package(benchmark, monkeypatch, tmp_path):
    sensitivity = benchmark("sensitivity")
    monkeypatch.setattr(sensitivity.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["sensitivity.py", "live-llamacpp", "1", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match=r"^live-llamacpp: not installed: xllamacpp; run: pip"):
        sensitivity.main()
    assert not (tmp_path / "o").exists()


def test_summaries_are_read_compressed_or_not(benchmark, tmp_path):
    sensitivity, studies = benchmark("sensitivity"), [{"study": "kernels-00"}]
    plain, compressed = tmp_path / "s.json", tmp_path / "s.json.xz"
    plain.write_text(json.dumps(studies))
    compressed.write_bytes(lzma.compress(plain.read_bytes()))
    assert sensitivity.summaries(plain) == sensitivity.summaries(compressed) == studies


@pytest.mark.parametrize("kind", ["table", "summary"])
@pytest.mark.parametrize("end", [None, 20])  # not compressed, and cut off
def test_a_damaged_file_of_summaries_is_one_line(benchmark, monkeypatch, tmp_path, kind, end):
    path = tmp_path / "s.json.xz"
    path.write_bytes(lzma.compress(b"[]")[:end] if end else b"[]")
    sensitivity = benchmark("sensitivity")
    monkeypatch.setattr(sys, "argv", ["sensitivity.py", kind, str(path)])
    with pytest.raises(SystemExit) as stop:
        sensitivity.main()
    assert stop.value.code and "\n" not in stop.value.code


def test_a_planted_revision_is_slower_and_leaves_nothing_in_the_checkout(
    benchmark, monkeypatch, tmp_path
):
    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        words = ["git", "-C", checkout, *who, *words]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    checkout, module = tmp_path / "checkout", Path("labkit", "engine", "llm_engine.py")
    monkeypatch.setattr(code_revision, "CHECKOUT", checkout)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    (checkout / module).parent.mkdir(parents=True)
    (checkout / "conf").mkdir()
    (checkout / "conf" / "config.yaml").touch()
    (checkout / module).write_text(dedent(ENGINE))
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "1")
    files = sorted((checkout / ".git").rglob("*"))

    planted = benchmark("planted_revision")
    environment = planted.slower_revision(git("rev-parse", "HEAD"), 0.5)
    assert sorted((checkout / ".git").rglob("*")) == files
    planted.slower_revision.cache_clear()
    assert planted.slower_revision(git("rev-parse", "HEAD"), 0.5) == environment
    exported = tmp_path / "cache" / "environments" / environment["revision"] / module
    names = {}
    exec(exported.read_text(), names)
    start = time.perf_counter()
    assert names["LLMEngine"]().step() == ["event"]
    assert time.perf_counter() - start >= 0.03


def test_the_delay_of_a_period_is_a_share_of_the_time_since_the_last_one(benchmark):
    planted = benchmark("planted_worker").Planted()
    planted.share, planted.since = 0.5, time.perf_counter() - 0.02
    start = time.perf_counter()
    assert planted.slow_period(len)("ab") == 2
    assert time.perf_counter() - start >= 0.01
    assert time.perf_counter() - planted.since < 0.01


def test_a_planted_request_for_frames_takes_longer_in_the_turn_of_its_arm(benchmark, monkeypatch):
    monkeypatch.setattr(WorkerProcess, "_turn", lambda self, arm: nullcontext())
    monkeypatch.setattr(InterleavedVideo, "__init__", InterleavedVideo.__init__)
    planted, ends = benchmark("planted_worker"), []
    monkeypatch.setattr(planted, "spin_until", ends.append)
    planted.plant_calls(None, "video")
    video = InterleavedVideo([None], [[]], None, decode_frames=lambda: time.sleep(0.02))
    names = ("planted_50pct", "control")
    worker = SimpleNamespace(runs=[SimpleNamespace(arm=SimpleNamespace(name=n)) for n in names])
    starts = []
    for arm in range(len(names)):
        with WorkerProcess._turn(worker, arm):
            starts.append(time.perf_counter())
            video._take()
    assert ends[0] >= starts[0] + 0.03
    assert ends[1] <= time.perf_counter()


@pytest.mark.parametrize("arm", ["planted_3pct", "control"])
def test_the_planted_arm_starts_the_planted_server(benchmark, monkeypatch, arm):
    command = ["python", "-m", "labkit.serve", "engine=paged"]
    monkeypatch.setattr(server_process, "build_command", lambda *arguments: command)
    worker = benchmark("planted_worker")
    worker.plant_server(worker.planted_share(arm))
    built = server_process.build_command(None, Path("model"), 1)
    if arm == "control":
        assert built == command
    else:
        planted = str(BENCHMARKS.resolve() / "planted_server.py")
        assert built == ["python", planted, "0.03", "engine=paged"]


def test_a_planted_server_s_engine_is_slower_by_the_share_of_its_own_work(benchmark, monkeypatch):
    def step(self):
        time.sleep(0.3)  # as if the server was stopped: no CPU time
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return ["event"]

    monkeypatch.setattr(LLMEngine, "step", step)
    benchmark("planted_server").plant(0.5)
    start, cpu_start = time.perf_counter(), time.process_time()
    assert LLMEngine.step(None) == ["event"]
    assert time.perf_counter() - start >= 0.33
    assert 0.03 <= time.process_time() - cpu_start < 0.08


def test_a_server_is_stopped_for_its_share_halfway_through_a_turn(benchmark, monkeypatch):
    def run_slice(self, arm, progress):
        events.append(self._order.slice_s)

    events, clock = [], ArmClock()
    order = SimpleNamespace(slice_s=1.0)
    arm, serving = SimpleNamespace(clock=clock), SimpleNamespace(_order=order)
    monkeypatch.setattr(SupervisedServer, "__init__", lambda self: setattr(self, "pid", 1234))
    monkeypatch.setattr(InterleavedServing, "_run_slice", run_slice)
    tree = SimpleNamespace(signal=lambda number: events.append((number, clock())))
    monkeypatch.setattr(process_tree, "ProcessTree", lambda pid, whole_group: tree)
    benchmark("planted_worker").plant_turns(0.03)
    SupervisedServer()
    for _ in range(2):
        InterleavedServing._run_slice(serving, arm, None)
        first, (stop, stopped), (resume, resumed), second = events
        assert (first, second) == (0.5, 0.5)
        assert (stop, resume) == (signal.SIGSTOP, signal.SIGCONT)
        assert resumed - stopped >= 0.028  # of the arm's clock, which runs meanwhile
        events.clear()


def test_the_pilot_and_the_preparation_have_no_planted_delay():
    """The worker's own options come before the arms, so a planted one would read them as an arm."""
    for option in ("--prepare", "--pilot"):
        arguments = [option, "absent.json", *(["--seconds", "1"] if option == "--pilot" else [])]
        done = subprocess.run(
            [sys.executable, str(BENCHMARKS / "planted_worker.py"), *arguments, "absent-arm.json"],
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and option not in done.stderr.splitlines()[-1], done.stderr
