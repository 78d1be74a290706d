"""Arms in processes of their own are compared with what the baseline's process has sent."""

import json
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from labkit.config import KVDType
from labkit.records import read_runs
from labkit.records.kl_histogram import decode_histogram
from labkit.workload.measurement import InvalidOutput
from labkit.workload.scoring import KIND
from labkit.workload.scoring.interleaved_scoring_arms import SENT_TOP
from labkit.workload.turn_order import Round
from labkit.workload.workload_protocols import NoMachineKernels, TurnContext

ROOT = Path(__file__).parents[3]


class LiveTurns:
    """The turns of a live worker; ``sent``: what the baseline's worker has sent, as JSON."""

    other_processes = True
    slice_s = 0.0

    def __init__(self, sent, is_baseline):
        self._sent, self._is_baseline = sent, is_baseline

    def rounds(self, parts):
        yield Round(0, ((0, 0),))

    def gather(self, values):
        if self._is_baseline:
            self._sent.append(json.dumps(values))
            return values, 0
        return [*json.loads(self._sent.pop(0)), *values], 1


@pytest.fixture(scope="module")
def experiment(compose_experiment):
    return compose_experiment(
        "workload=scoring",
        "model=tiny",
        "workload.window_tokens=24",
        "workload.num_windows=5",
        "workload.concurrency=2",
        "engine.budget.blocks=64",
    )


def notes(arms, granted=None, baseline=0):
    turns = TurnContext(
        0, random.Random(0), lambda arm: nullcontext(), NoMachineKernels(), granted, baseline
    )
    loaded = KIND.load(arms, turns)
    try:
        return [m.cases[0].notes["scoring"] for m in loaded.measure(lambda text: None)]
    finally:
        loaded.close()


def with_half_kv(experiment):
    kv = replace(experiment.engine.kv, dtype=KVDType.bfloat16)
    return replace(experiment, engine=replace(experiment.engine, kv=kv))


def divergences(note):
    windows = note["windows"]
    return np.concatenate(
        [decode_histogram(window["kl_histogram"], window["tokens"]) for window in windows]
    )


def test_an_arm_in_another_process_has_the_quality_of_one_process(experiment):
    half, sent = with_half_kv(experiment), []
    base, together = notes([experiment, half])
    (alone,) = notes([experiment], LiveTurns(sent, True))
    (apart,) = notes([half], LiveTurns(list(sent), False), None)
    (same,) = notes([experiment], LiveTurns(list(sent), False), None)
    assert divergences(same).max() == divergences(alone).max() == 0
    assert (base["reference_top"], apart["reference_top"]) == (4096, SENT_TOP)
    for ours, theirs in zip(apart["windows"], together["windows"], strict=True):
        assert ours["nll"] == pytest.approx(theirs["nll"])
        assert ours["same_top1"] == theirs["same_top1"]
    whole, top = divergences(together), divergences(apart)
    assert (top <= whole * 1.01 + 1e-9).all() and 0 < top.mean() < whole.mean()


def test_without_the_baseline_or_its_windows_the_run_fails_in_one_line(experiment):
    sent = []
    notes([experiment], LiveTurns(sent, True))
    gone = [json.dumps([]) for _ in sent]
    with pytest.raises(InvalidOutput, match="the baseline's process has ended"):
        notes([experiment], LiveTurns(gone, False), None)
    shorter = replace(experiment, workload=replace(experiment.workload, window_tokens=16))
    with pytest.raises(InvalidOutput, match="score different windows"):
        notes([shorter], LiveTurns(sent, False), None)


@pytest.mark.slow
def test_a_whole_live_study_has_the_same_quality(tmp_path):
    command = (
        *(sys.executable, "-m", "labkit", "ablation=none", "workload=scoring", "model=tiny"),
        *("+ablation.arms.over={engine.pipeline: overlap}", "ablation.claims.identity=none"),
        *("+ablation.arms.half={engine.kv.dtype: bfloat16}", "workload.window_tokens=32"),
        *("workload.num_windows=8", "design=quick", "design.blocks=1", f"out={tmp_path / 's'}"),
    )
    done = subprocess.run(
        [*command, "-m"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    (runs,) = (tmp_path / "s").glob("*/runs")
    records = read_runs(runs.parent)
    assert {record.outcome for record in records} == {"ok"}, done.stdout + done.stderr
    assert {record.notes["isolation"] for record in records} == {"live"}
    kl = {r.arm: divergences(r.cases[0].notes["scoring"]).mean() for r in records}
    assert kl["over"] == kl["control"] == kl["base"] == 0 < kl["half"] < 0.01
