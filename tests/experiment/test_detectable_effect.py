"""A plan's detectable effect is that of the verdict: adjusted for rows, arms and looks."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.analysis.statistics import best_arm
from labkit.analysis.statistics.power import (
    attained_alpha,
    blocks_needed,
    single_row_mde_pct,
)
from labkit.config import Case, Design, Engine, Isolation, PlannedLook
from labkit.experiment.schedule import (
    doctor_noise_cache,
    noise_history,
    plan_preview,
    power_forecast,
)
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.experiment.schedule.noise_history import StudyHistory
from labkit.records import Arm


def cell_json(sd=0.01, alpha_row=0.004, level=0.95, arms=1, blocks=4, runs=1):
    names = [f"arm{i}" for i in range(arms)]
    comparisons = [
        {"arm": name, "sd": sd, "alpha_row": alpha_row, "level": level, "blocks": blocks}
        for name in names
    ]
    row = {"metric": "dispatch_us", "primary": True, "skipped": None, "comparisons": comparisons}
    other = {"metric": "y", "primary": False, "skipped": None}
    other["comparisons"] = [{**comparisons[0], "sd": 9.0}]
    roles = [{"name": "base", "role": "baseline"}, *({"name": n, "role": "arm"} for n in names)]
    design = {"runs_per_block": runs}
    return {"arms": roles, "rows": [row, row, other], "design": design}


def forecast(design, tmp_path, arms=1, cases=10, metrics=("dispatch_us",), states=1, sweep=None):
    cases = [Case(name=str(n), decode=1, context=1) for n in range(cases)]
    experiment = SimpleNamespace(
        workload=SimpleNamespace(has_engine=True, times_kernels=bool(cases), cases=cases),
        engine=Engine(name="paged"),
    )
    roles = ("baseline", *("arm",) * arms, "control")
    composed = SimpleNamespace(
        experiment=experiment,
        arms=[SimpleNamespace(role=role) for role in roles],
        experiments=dict.fromkeys(range(len(roles)), experiment),
        metrics=metrics,
    )
    cell = SimpleNamespace(
        design=design, cases=cases, rows_of=lambda cases: cases * states, sweep=sweep or {}
    )
    return power_forecast.detectable_effect_line(cell, composed, StudyHistory(tmp_path))


@pytest.fixture
def known(monkeypatch, tmp_path):
    def give(**facts):
        monkeypatch.setattr(
            StudyHistory, "studies", lambda self, c, way: iter([(tmp_path, cell_json(**facts))])
        )

    return give


def test_the_noise_is_that_of_the_cell_s_own_isolation(monkeypatch, tmp_path):
    """``design.confirm`` adds a cell of separate processes to an interleaved one."""
    sds = {Isolation.in_process: 0.01, Isolation.process: 0.1}
    monkeypatch.setattr(
        StudyHistory, "studies", lambda self, c, way: iter([(tmp_path, cell_json(sd=sds[way]))])
    )
    turns, apart = (forecast(Design(blocks=12, isolation=way), tmp_path) for way in sds)
    found = [float(line.split("detects ")[1].split(" %")[0]) for line in (turns, apart)]
    assert found[1] > 5 * found[0]


def test_an_earlier_study_gives_a_row_s_share_of_alpha(known, tmp_path):
    # The earlier studies have 4 blocks of 2, so their noise has 11 degrees of freedom.
    known(alpha_row=attained_alpha(4, 2, 0.05) / 10, runs=2)
    message = forecast(Design(blocks=12), tmp_path)
    assert f"detects {single_row_mde_pct(0.01, 12, 1, 0.05, 0.1, 11):.1f} % at best" in message
    assert f"{blocks_needed(0.01, 1, 0.05, 1.0, 0.1, 11)} blocks would detect 1 %" in message
    known(alpha_row=attained_alpha(4, 2, 0.025) / 10, runs=2, arms=2)  # arms that shared alpha
    assert message == forecast(Design(blocks=12), tmp_path)
    assert f"detects {single_row_mde_pct(0.01, 12, 1, 0.0125, 0.1, 11):.1f} %" in forecast(
        Design(blocks=12), tmp_path, arms=4
    )
    pairs = forecast(Design(blocks=6, runs_per_block=2), tmp_path)
    assert f"detects {single_row_mde_pct(0.01, 6, 2, 0.05, 0.1, 11):.1f} % at best" in pairs


def test_a_look_detects_with_its_own_alpha(known, tmp_path):
    known(alpha_row=attained_alpha(8, 1, 0.01) * 0.2, level=0.99, blocks=8)
    looks = [PlannedLook(8, 0.02), PlannedLook(12, 0.03)]
    design = Design(blocks=12, looks=looks)
    each = [single_row_mde_pct(0.01, look.blocks, 1, look.alpha, 0.2, 7) for look in looks]
    assert each[1] < each[0]
    assert f"detects {each[1]:.1f} % at best" in forecast(design, tmp_path)
    shorter = Design(blocks=8, looks=looks)  # it may grow to the second look
    assert f"detects {each[0]:.1f} % at best" in forecast(shorter, tmp_path)


def test_a_sweep_s_effect_is_that_by_which_a_setting_is_told_from_the_best(known, tmp_path):
    """It was that of pairs under their relabellings, which 6 blocks of 4 settings cannot have."""
    known(runs=2)
    for blocks in (6, 12):
        line = forecast(Design(blocks=blocks), tmp_path, 3, 1, sweep={"engine.kv.block_size": [8]})
        (told,) = re.findall(r"^detects (\S+) % at best; ", line)
        effect, rng, count = math.log1p(float(told) / 100), np.random.default_rng(blocks), 0
        for _ in range(100):
            values = rng.normal([effect, 0, 0, 0], 0.01, (blocks, 1, 4))
            count += 4 - len(best_arm.possibly_best(values, 0.05))
        assert 0.75 <= count / 300 <= 0.95, (blocks, count)


def test_without_an_earlier_study_rows_count_as_independent(monkeypatch, tmp_path):
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way: iter(()))
    monkeypatch.setattr(doctor_noise_cache, "load_noise_sd", lambda: 0.01)
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", lambda kind: None)
    message = forecast(Design(blocks=12), tmp_path, arms=2, cases=5)
    assert f"detects {single_row_mde_pct(0.01, 12, 1, 0.025, 0.2):.1f} % at best" in message
    one = forecast(Design(blocks=12), tmp_path, arms=1, cases=0)  # requests: one row
    assert f"detects {single_row_mde_pct(0.01, 12, 1, 0.05):.1f} % at best" in one
    speeds = ("total_tok_s", "output_tok_s")
    four = single_row_mde_pct(0.01, 12, 1, 0.05, 0.25)
    for rows in ({"cases": 2, "metrics": speeds}, {"cases": 2, "states": 2}):
        assert f"detects {four:.1f} % at best" in forecast(Design(blocks=12), tmp_path, **rows)


def test_pilot_noise_wins_over_the_noise_within_a_process(monkeypatch, tmp_path):
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way: iter(()))
    monkeypatch.setattr(doctor_noise_cache, "load_noise_sd", lambda: 9.0)
    pilots = {
        "kernels": PilotNoise(5, 0.01, 0.05, 2.0, 1.5),
        "requests": PilotNoise(5, 0.02, 0.05, 2.0, 1.5),
    }
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", pilots.get)
    turns = Design(blocks=12, isolation=Isolation.in_process)
    message = forecast(turns, tmp_path, cases=5)
    assert f"detects {single_row_mde_pct(0.01, 12, 1, 0.05, 0.2, 4):.1f} % at best" in message
    assert "the doctor's short kernels, estimated" in message
    processes = forecast(Design(blocks=12, isolation=Isolation.process), tmp_path, cases=0)
    assert f"detects {single_row_mde_pct(0.05, 12, 1, 0.05, sd_df=4):.1f} % at best" in processes
    assert "the doctor's short requests, estimated" in processes


@pytest.mark.parametrize(("blocks", "runs", "known"), [(3, 1, False), (4, 1, True), (2, 2, True)])
def test_noise_of_too_few_blocks_is_unknown(blocks, runs, known):
    assert (noise_history.cell_noise(cell_json(blocks=blocks, runs=runs)) is not None) == known


def test_a_study_without_results_has_no_noise():
    assert (
        noise_history.cell_noise({"arms": [], "rows": [], "design": {"runs_per_block": 1}}) is None
    )
    assert noise_history.cell_noise(cell_json(sd=None)) is None
    unreached = noise_history.cell_noise(cell_json(alpha_row=0.0))
    assert (unreached.sd, unreached.alpha_share) == (0.01, None)


def test_the_noise_is_that_of_the_question_s_metrics():
    earlier = cell_json(sd=0.02)
    assert noise_history.cell_noise(earlier).sd == 0.02
    of_y = noise_history.cell_noise(earlier, ("y",))
    assert of_y.sd == 9.0 and of_y.alpha_share is None, "a row of another family"
    assert noise_history.cell_noise(earlier, ("z",)) is None


def test_the_doctor_knows_nothing_of_latencies(monkeypatch, tmp_path):
    pilot = PilotNoise(5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=2.0, separate_s=1.5)
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", lambda kind: pilot)
    monkeypatch.setattr(doctor_noise_cache, "load_noise_sd", lambda: 0.01)
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way: iter(()))
    design = Design(blocks=8, isolation=Isolation.in_process)
    assert "the doctor" in forecast(design, tmp_path, metrics=("total_tok_s",))
    assert "is not known" in forecast(design, tmp_path, metrics=("total_tok_s", "e2e_p50_ms"))


@pytest.mark.parametrize("metrics", [(), ("my_score",), ("total_tok_s", "my_score")])
def test_the_doctor_knows_nothing_of_a_metric_of_one_s_own(monkeypatch, tmp_path, metrics):
    """Not even its name is known before the first run if the workload's class is one's own."""
    monkeypatch.setattr(doctor_noise_cache, "load_noise_sd", lambda: 0.01)
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", lambda kind: None)
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way: iter(()))
    assert "is not known" in forecast(Design(blocks=12), tmp_path, metrics=metrics)


def test_a_plan_gives_no_direction_of_a_metric_of_one_s_own():
    """Its records say which values are better; the plan said that the lower are."""
    cell = SimpleNamespace(
        question=None,
        metrics=("my_score", "total_tok_s"),
        design=Design(),
        arms=[Arm("base", "baseline", {}, {})],
    )
    line, _ = plan_preview._question_lines(cell)
    known = "throughput (tok/s, higher is better)"
    assert line == f"metric: my_score; {known}; equivalent within ±2 %"


def test_noise_too_large_to_plan_with_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(StudyHistory, "studies", lambda self, c, way: iter(()))
    monkeypatch.setattr(doctor_noise_cache, "load_noise_sd", lambda: 0.8)
    pilot = PilotNoise(5, interleaved_sd=0.8, separate_sd=0.8, interleaved_s=2.0, separate_s=1.5)
    monkeypatch.setattr(doctor_noise_cache, "load_pilot_noise", lambda kind: pilot)
    design = Design(blocks=8, isolation=Isolation.in_process)
    line = forecast(design, tmp_path)
    assert "is not known" in line and "noise of 80 % (the doctor" in line
