"""Worker processes with all arms of a block, interleaved at every repeat."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from planted_runs import Notes, PlantedRuns

from labkit import analysis, config
from labkit.config import ConfigError, Isolation
from labkit.experiment.launch.run_launcher import WorkerLauncher
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.worker import worker_run, worker_setup
from labkit.experiment.worker.granted_turns import GrantedTurns
from labkit.experiment.worker.run_draft import StageTimer
from labkit.records import CaseRecord, Metric, Record, read_cell, read_runs
from labkit.workload.workload_protocols import Measurement

CASES = [
    config.Case(name="few", decode=2, context=16, factor=2),
    config.Case(name="mixed", decode=2, context=16, prefill=1, chunk=40),
]


@pytest.fixture
def make(make_cell, replace):
    """Make an in-process cell whose arms time ``cases`` five times ``factor``."""

    def cell(cases=CASES[:1], **design):
        whole = make_cell(**{"isolation": Isolation.in_process, "blocks": 2, **design})
        arms = []
        for arm in whole.arms:
            plain = json.loads(json.dumps(arm.config))
            small = config.Workload(
                name="small",
                kind="kernel",
                repeats=5,
                warmup=1,
                num_heads=2,
                num_kv_heads=1,
                head_dim=64,
                max_pool_bytes=1 << 20,
                cases=list(cases),
            )
            plain["workload"] = config.to_plain(small)
            arms.append(replace(arm, config=plain))
        return replace(whole, arms=tuple(arms))

    return cell


def blocks_of(cell) -> list[list[Record]]:
    records = read_runs(cell.dir)
    return [[r for r in records if r.block == b] for b in range(cell.design.blocks)]


# ------------------------------------------------------------------ without a process


class InterleavedArms:
    """Three arms whose turns do nothing but say that they happen."""

    def __init__(self, world, arms, setting) -> None:
        self.world, self.arms, self.setting = world, arms, setting

    def warm_up(self) -> None:
        self.world.events.append("warm up")

    prepare = warm_up

    def measure(self, beat) -> list[Measurement]:
        measured = []
        for arm, counters in enumerate(self.world.counters[: len(self.arms)]):
            with self.setting.turn(arm):
                self.world.events.append(("turn", arm, self.world.threads))
            value = self.setting.order.random()
            metric = Metric("dispatch_us", "us", "lower", True, (value,))
            measured.append(Measurement((CaseRecord("few", None, (metric,), None),), counters))
        return measured

    def close(self) -> None:
        self.world.events.append("close")


@pytest.fixture
def world(monkeypatch):
    ok = {"engine.paged": 1.0, "resolver.seq_map": 1.0}
    probe = SimpleNamespace(time=dict)
    world = SimpleNamespace(
        events=[], threads=None, known_answer_tests=0, counters=[ok, ok, ok], probe=probe
    )

    def thread_budget(experiment):
        world.known_answer_tests += 1
        return experiment.engine.attention.resolver

    def apply_thread_budget(threads):
        world.threads = threads

    def load(experiments, setting, note):
        return InterleavedArms(world, experiments, setting)

    monkeypatch.setattr(worker_setup, "load", load)
    monkeypatch.setattr(worker_setup, "start_probe", lambda on_compile: (probe, {}))
    monkeypatch.setattr(worker_setup, "needs_peak_rates", lambda experiment, block: False)
    monkeypatch.setattr(worker_setup, "thread_budget", thread_budget)
    monkeypatch.setattr(worker_setup, "apply_thread_budget", apply_thread_budget)
    return world


def block_of(cell, number=0, arms=None) -> list[Record]:
    arms = cell.arms if arms is None else arms
    new = [
        Record(arm.name, arm.role, number, i, cell.seed, "ok", "2026-11-20T20:00:00Z")
        for i, arm in enumerate(arms)
    ]
    return worker_run.WorkerProcess(new, arms, StageTimer(0)).run()


def test_every_arm_has_its_record_and_its_thread_budget_in_its_turns(make, world):
    records = block_of(make())
    assert world.events == [
        "warm up",
        ("turn", 0, "binary_search"),
        ("turn", 1, "seq_map"),
        ("turn", 2, "binary_search"),
        "close",
    ]
    assert [record.arm for record in records] == ["base", "seq_map", "control"]
    assert all(record.notes["together"] == [r.run for r in records] for record in records)
    assert all(record.seconds["turns"] >= 0 for record in records)


def test_a_process_that_is_stopped_between_its_turns_forgets_the_stop_in_each(
    make, world, monkeypatch
):
    monkeypatch.setattr(worker_setup, "forget_own_stop", lambda: world.events.append("forget"))
    cell = make()
    block_of(cell)
    assert "forget" not in world.events
    world.events.clear()
    records = [Record("seq_map", "arm", 0, 0, 7, "ok", "2026-11-20T20:00:00Z")]
    granted = Mock(spec=GrantedTurns)
    worker_run.WorkerProcess(records, cell.arms[1:2], StageTimer(0), granted).run()
    assert world.events == ["warm up", "forget", ("turn", 0, "seq_map"), "close"]


def test_a_record_has_the_versions_of_installed_classes(make, world, monkeypatch, replace):
    monkeypatch.setattr(worker_run, "installed_versions", lambda module: {f"for {module}": "1.2"})
    base, seq_map, *_ = make().arms
    plain = json.loads(json.dumps(seq_map.config))
    plain["engine"]["attention"]["resolver"] = "plug.maps:Maps"
    plain["workload"] = {"kind": "plug.kinds:Kind"}
    records = block_of(make(), arms=[base, replace(seq_map, config=plain)])
    for record in records:  # the arms share the process
        versions = record.environment["versions"]
        assert versions["for plug.maps"] == versions["for plug.kinds"] == "1.2"
        assert "labkit" in versions


def test_an_arm_s_thread_budget_is_computed_once(make, world, monkeypatch):
    class Twice(InterleavedArms):
        def measure(self, beat):
            super().measure(beat)
            return super().measure(beat)

    def load(experiments, setting, note):
        return Twice(world, experiments, setting)

    monkeypatch.setattr(worker_setup, "load", load)
    block_of(make())
    turns = [event for event in world.events if event[0] == "turn"]
    assert len(turns) == 6 and world.known_answer_tests == 3


def test_the_workload_gets_the_probe_for_work_between_turns(make, world, monkeypatch):
    given = []

    def load(experiments, setting, note):
        given.append(setting.machine)
        return InterleavedArms(world, experiments, setting)

    monkeypatch.setattr(worker_setup, "load", load)
    block_of(make())
    assert len(given) == 1 and given[0] is world.probe


def test_a_single_arm_runs_the_same_stages(make, world):
    cell = make()
    (record,) = block_of(cell, arms=cell.arms[1:2])
    assert record.ok and "together" not in record.notes
    assert world.events == ["warm up", ("turn", 0, "seq_map"), "close"]


def test_the_order_depends_on_the_seed_and_the_block_alone(make, world):
    def drawn(number, seed=7):
        return [r.cases[0].metrics[0].repeats for r in block_of(make(seed=seed), number)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, seed=8)


def test_two_processes_of_an_arm_in_one_block_have_different_orders(make, world, replace):
    arms = make().arms[:1]
    first = Record("base", "baseline", 0, 0, 7, "ok", "2026-11-20T20:00:00Z")
    drawn = [
        worker_run.WorkerProcess([record], arms, StageTimer(0)).run()[0].cases[0].metrics
        for record in (first, replace(first, position=4))
    ]
    assert drawn[0] != drawn[1]


def test_a_vacuous_arm_fails_alone(make, world):
    world.counters = [dict(world.counters[0]) for _ in range(3)]
    world.counters[1]["resolver.seq_map"] = 0.0
    assert [r.outcome for r in block_of(make())] == ["ok", "vacuous", "ok"]


def test_a_failure_between_turns_is_not_blamed_on_an_arm(make, world):
    def fail_after_the_measurement():
        if "close" in world.events:
            raise RuntimeError("planted")
        return {}

    world.probe.time = fail_after_the_measurement
    records = block_of(make())
    assert {r.detail.split(": ", 1)[1] for r in records} == {"RuntimeError: planted"}
    assert not any("in one process" in r.detail for r in records)


def test_a_record_has_the_probe_s_times_before_and_after(make, world):
    times = iter([{"matmul_us": 1.0}, {"matmul_us": 2.0}])
    world.probe.time = lambda: next(times)
    for record in block_of(make()):
        assert record.probe == {"before": {"matmul_us": 1.0}, "after": {"matmul_us": 2.0}}


def test_a_thread_budget_is_limited_by_numba_s_pool(monkeypatch):
    budgets = []
    numba = SimpleNamespace(
        set_num_threads=budgets.append, config=SimpleNamespace(NUMBA_NUM_THREADS=4)
    )
    monkeypatch.setitem(sys.modules, "numba", numba)
    for threads in (1, 3, 9):
        worker_setup.apply_thread_budget(threads)
    assert budgets == [1, 3, 4]


# ------------------------------------------------------------------ processes, stub workload


def test_a_block_is_one_process_and_every_arm_has_its_record(make, launcher):
    cell = make()
    assert run_cell(cell, launcher).ran == 2 * 3
    for block in blocks_of(cell):
        assert [r.arm for r in block] == [
            run.arm for run in cell.schedule() if run.block == block[0].block
        ]
        assert {r.notes["isolation"] for r in block} == {"in_process"}
        assert all(r.notes["together"] == [x.run for x in block] for r in block)
        assert len({r.seconds["process"] for r in block}) == 1
        assert sum(r.seconds["total"] for r in block) <= sum(r.seconds["process"] for r in block)
        assert all(r.probe == block[0].probe and r.environment_end for r in block)
        assert (cell.dir / "runs" / f"{block[0].run}.log").exists()
    assert len(list((cell.dir / "runs").glob("b*.log"))) == 2
    assert read_cell(cell.dir)["design"]["isolation"] == "in_process"


@pytest.mark.parametrize("stage", ["load", "warm_up", "measure"])
def test_a_failed_arm_fails_its_block_and_the_others_say_why(make, launcher, monkeypatch, stage):
    monkeypatch.setenv("LABKIT_TEST_FAULT", f"{stage}:poison:seq_map")
    cell = make(blocks=1)
    outcome = run_cell(cell, launcher)
    assert len(outcome.failed) == 3
    (block,) = blocks_of(cell)
    name = next(r.run for r in block if r.arm == "seq_map")
    for record in block:
        assert record.outcome == "invalid_output"
        other = "" if record.run == name else f"in one process with {name}: "
        assert record.detail == f"{other}planted NaN"


@pytest.mark.parametrize(
    ("stage", "death", "detail"),
    [
        ("load", "exit", "exit status 7: "),
        ("warm_up", "segv", "SIGSEGV: "),
        ("measure", "kill", "SIGKILL: "),
    ],
)
def test_a_process_that_dies_names_the_arm_in_turn(
    make, launcher, monkeypatch, stage, death, detail
):
    monkeypatch.setenv("LABKIT_TEST_FAULT", f"{stage}:{death}:seq_map")
    cell = make(blocks=1)
    notes = Notes()
    run_cell(cell, launcher, notes)
    (block,) = blocks_of(cell)
    culprit = next(r for r in block if r.arm == "seq_map")
    assert culprit.detail.startswith(detail) and "failed_by" not in culprit.notes
    for record in block:
        assert record.outcome == "crashed"
        if record is not culprit:
            assert record.notes["failed_by"] == culprit.run
            assert record.detail == f"in one process with {culprit.run}: {culprit.detail}"
    lost = [line for line in notes.lines if "also lost" in line]
    assert len(lost) == 1 and "base" in lost[0] and "control" in lost[0]
    (reason,) = analysis.analyse_cell(cell.dir)["gates"]["healthy"]["reasons"]
    assert reason.startswith(culprit.run) and "log: runs/" in reason


def test_a_process_that_hangs_names_the_arm_in_turn(make, launcher, time_over, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:hang:seq_map")
    cell = make(blocks=1)
    run_cell(cell, launcher)
    (block,) = blocks_of(cell)
    assert {r.outcome for r in block} == {"timeout"}
    assert all(r.detail.endswith("(in the turn of seq_map)") for r in block)


def test_a_process_that_dies_between_turns_blames_no_arm(make, launcher, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "write:kill")
    cell = make(blocks=1)
    run_cell(cell, launcher)
    (block,) = blocks_of(cell)
    assert not any("failed_by" in r.notes for r in block)


def test_a_process_killed_while_measuring_loses_only_its_own_runs(make, launcher, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:kill:seq_map:b01")
    cell = make(blocks=3)
    assert len(run_cell(cell, launcher).failed) == 3
    first, killed, last = blocks_of(cell)
    assert {r.outcome for r in (*first, *last)} == {"ok"}
    assert {r.outcome for r in killed} == {"crashed"}
    monkeypatch.setenv("LABKIT_TEST_FAULT", "")
    kept = {r.run: r.started for r in (*first, *last)}
    again = run_cell(cell, launcher, redo_failed=True)
    assert (again.ran, again.failed) == (3, ())
    now = {r.run: r.started for r in read_runs(cell.dir)}
    assert {run: now[run] for run in kept} == kept


def test_isolations_are_not_mixed_in_one_folder(make, make_cell, replace):
    run_cell(replace(make_cell(blocks=2), arms=make().arms), PlantedRuns())
    with pytest.raises(ConfigError, match=r"design\.isolation was process, now in_process"):
        run_cell(make(), PlantedRuns())


# ------------------------------------------------------------------ the real worker and kernels


def test_interleaved_kernels_give_the_outputs_of_separate_processes(
    user_cache, make, make_cell, monkeypatch
):
    monkeypatch.setenv("LABKIT_CACHE", str(user_cache))
    real = WorkerLauncher((sys.executable, "-m", "labkit.experiment.worker"))
    one = make(cases=CASES, control=False, blocks=1, folder="together")
    apart = make_cell(control=False, folder="apart")
    object.__setattr__(apart, "arms", one.arms)
    for cell in (one, apart):
        run_cell(cell, real)
        assert [r.outcome for r in read_runs(cell.dir)] == ["ok"] * len(cell.schedule())
    digests = {
        (r.arm, c.case, c.outputs["digest"])
        for cell in (one, apart)
        for r in read_runs(cell.dir)
        for c in r.cases
    }
    assert len(digests) == 2 * len(CASES)
    counts = {len(c.metrics[0].repeats) for r in read_runs(one.dir) for c in r.cases}
    assert counts == {10, 5}
    gates = analysis.analyse_cell(one.dir)["gates"]
    assert (gates["healthy"]["status"], gates["identical"]["status"]) == ("pass", "pass")
