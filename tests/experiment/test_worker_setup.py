"""Stages of a worker process: probe, threads, BLAS, peak rates; and drafts of records."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numba
import pytest

from labkit import workload
from labkit.config import Device, Experiment, from_plain
from labkit.cpu import roofline_peaks
from labkit.cpu.runtime import thread_pool
from labkit.experiment.worker import mlx_known_answer_test, worker_setup
from labkit.experiment.worker.run_draft import RunDraft, StageTimer
from labkit.machine import openblas_for_mlx, worker_environment
from labkit.records import Arm, CaseRecord, Record
from labkit.workload.workload_protocols import Measurement, single_arm_context

REQUESTS = {"name": "uniform", "prompts": {"source": "synthetic"}}
KERNELS = {"name": "k", "kind": "kernel", "cases": [{"name": "d", "decode": 1, "context": 1}]}


def experiment(workload=REQUESTS, **engine):
    return from_plain(
        Experiment,
        {
            "engine": engine,
            "model": {"shape": {}},
            "workload": workload,
            "ablation": {"arms": {"base": {}}},
        },
    )


def a_draft(block=0):
    return RunDraft(Record("a", "arm", block, 0, 0, "ok", "now"), StageTimer(0))


def test_a_failed_run_says_whether_mlx_still_computes_correctly(monkeypatch, capsys):
    def stale():
        raise mlx_known_answer_test.StaleResult("a stale result")

    monkeypatch.setattr(mlx_known_answer_test, "check", stale)
    draft = a_draft()
    with draft.catch_failures():
        raise ValueError("broken")
    assert (draft.record.outcome, draft.record.notes["canary"]) == ("crashed", "a stale result")
    assert "ValueError: broken" in capsys.readouterr().err


def test_numba_s_objects_are_exempt_from_garbage_collection():
    code = (
        "import gc; from labkit.experiment.worker import worker_setup\n"
        "worker_setup.start_probe(lambda: None)\n"
        "print(gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    enabled, collectable, frozen = done.stdout.split()
    assert enabled == "True"
    assert int(collectable) < 10_000 < 50_000 < int(frozen)


@pytest.mark.parametrize(
    ("engine", "blas_threads"),
    [
        ({"name": "mlx_lm", "threads": 3}, 3),
        ({"name": "mlx_lm"}, 5),
        ({"name": "paged", "threads": 3}, 1),
        ({"name": "paged"}, 1),
    ],
)
def test_the_thread_budget_goes_to_the_pool_that_does_the_work(engine, blas_threads, monkeypatch):
    monkeypatch.setattr(worker_environment, "core_count", lambda: 5)
    engine_config = experiment(**engine).engine
    assert (
        worker_environment.blas_threads(engine_config.name, engine_config.threads) == blas_threads
    )
    assert worker_setup.thread_budget(experiment(**engine)) == engine.get("threads", 5)


def test_starting_the_probe_returns_the_facts_of_the_thread_pool():
    _, pool = worker_setup.start_probe(lambda: None)
    assert (pool["name"], pool["threads"]) == ("labkit", numba.config.NUMBA_NUM_THREADS)
    assert pool == thread_pool.install().settings


def test_the_thread_pool_forgets_that_the_process_was_stopped(monkeypatch):
    uncrowded = []
    monkeypatch.setattr(thread_pool.Pool, "uncrowd", lambda pool: uncrowded.append(pool))
    worker_setup.forget_own_stop()
    assert uncrowded == [thread_pool.install()]


@pytest.mark.parametrize(
    ("engine", "backend", "noted"),
    [
        (KERNELS, "fused", False),
        (KERNELS, "reference", False),
        (KERNELS, "gather", True),
        (REQUESTS, "fused", True),
        (REQUESTS, "gather", True),
    ],
)
def test_a_record_names_the_blas_only_if_mlx_multiplies(engine, backend, noted, monkeypatch):
    monkeypatch.setattr(
        openblas_for_mlx, "activate", lambda kind, threads: {"name": kind, "threads": threads}
    )
    monkeypatch.setattr(workload, "load", lambda *_, **__: None)
    monkeypatch.setattr(worker_setup, "apply_thread_budget", lambda threads: None)
    draft = a_draft()
    arm = experiment(engine, attention={"backend": backend}, blas="stock")
    worker_setup.load([arm], single_arm_context(0), draft.note)
    assert draft.record.notes.get("blas") == ({"name": "stock", "threads": 1} if noted else None)


def test_the_thread_budget_is_applied_before_loading_and_before_peak_rates(monkeypatch):
    done = []
    monkeypatch.setattr(worker_setup, "apply_thread_budget", done.append)
    monkeypatch.setattr(workload, "load", lambda *_: done.append("load"))
    monkeypatch.setattr(
        roofline_peaks, "measure_peaks", lambda threads: done.append(("peaks", threads))
    )
    arms = [experiment(KERNELS, threads=n) for n in (3, 2)]
    worker_setup.load(arms, single_arm_context(0), a_draft().note)
    worker_setup.measure_peak_rates(arms[1])
    assert done == [3, "load", 2, ("peaks", 2)]


def test_only_kernels_on_the_cpu_have_peak_rates(monkeypatch):
    monkeypatch.setattr(roofline_peaks, "measure_peaks", lambda threads: {"threads": threads})

    used = []
    monkeypatch.setattr(worker_setup, "apply_thread_budget", used.append)

    def noted(kind, device, memory_limit=None, block=0):
        attention = SimpleNamespace(device=device)
        engine = SimpleNamespace(threads=3, attention=attention, memory_limit=memory_limit)
        workload = SimpleNamespace(times_kernels=kind == "kernel")
        experiment = SimpleNamespace(engine=engine, workload=workload)
        if not worker_setup.needs_peak_rates(experiment, block):
            return False
        return worker_setup.measure_peak_rates(experiment) == {"threads": 3}

    assert noted("kernel", Device.cpu)
    assert used == [3]
    assert not noted("kernel", Device.emulated)
    assert not noted("requests", Device.cpu)
    assert not noted("kernel", Device.cpu, memory_limit=1 << 30)
    blocks = [noted("kernel", Device.cpu, block=block) for block in range(6)]
    assert blocks == [True, True, True, False, False, False]


def test_compilations_are_counted_by_stage():
    draft = a_draft()
    worker_setup.start_probe(draft.count_compilation)
    add = numba.njit(lambda a, b: a + b)
    with draft.stage("measure"):
        add(1, 2)
        add(3, 4)
        add(1.0, 2.0)
    # A machine that has never run the probe compiles it at the start.
    assert set(draft.compiles) - {"startup"} == {"measure"}
    assert draft.compiles["measure"] == 2


def test_numba_starts_without_scipy_and_finds_it_later():
    script = """
import sys
from labkit.experiment.worker import worker_setup
probe, _ = worker_setup.start_probe(lambda: None)
assert not any(name.startswith("scipy.linalg") for name in sys.modules)
assert all(v > 0 for v in probe.time().values())
import numba, numpy as np
product = numba.njit(lambda a, b: np.dot(a, b))
assert (product(np.eye(3), np.ones((3, 3))) == 1).all()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_attention_alone_loads_no_kernel_of_a_model():
    script = """
import sys
from labkit.engine import attention
from labkit.workload.kernels import interleaved_kernels
attention.create()
loaded = {name.rpartition(".")[2] for name in sys.modules if "labkit.cpu" in name}
assert "kernel_entry_points" in loaded
kernels = {"graph_replay", "gemm", "quantized_matmul", "norms", "rope", "activations"}
print(*sorted(loaded & kernels))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_an_unserved_request_fails_a_run_only_if_all_served_is_claimed():
    unserved = [{"id": "r3", "outcome": "refused", "error": "no room"}]
    cases = (CaseRecord("all", notes={"traffic": {"unserved": unserved}}),)
    measured = Measurement(cases, {})

    def outcome(**claims):
        draft = a_draft()
        draft.add_measurement(measured, Arm("a", "arm", {}, {}, **claims))
        return draft.record.outcome, draft.record.detail

    assert outcome() == ("ok", None)
    assert outcome(all_served=True) == (
        "invalid_output",
        "request r3 refused: no room; the ablation claims that all requests are served "
        "(claims.all_served)",
    )


def test_a_run_without_a_measured_case_fails_for_the_reason_that_skipped_it():
    skipped = CaseRecord("a.mp4", skipped="a.mp4: OpenCV cannot open the clip")
    arm = Arm("opencv", "arm", {}, {}, engaged=("picks.stream",))

    def outcome(*cases, counters):
        draft = a_draft()
        draft.add_measurement(Measurement(cases, counters), arm)
        return draft.record.outcome, draft.record.detail

    assert outcome(skipped, counters={}) == (
        "invalid_output",
        "no case was measured; a.mp4: OpenCV cannot open the clip",
    )
    assert outcome(skipped, CaseRecord("all"), counters={"picks.stream": 1.0}) == ("ok", None)
