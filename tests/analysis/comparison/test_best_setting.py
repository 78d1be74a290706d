"""The best setting of a sweep: rows that are only estimated, and values of 0 or below."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.arm_comparison import OUT_OF_REACH, DecisionCriteria
from labkit.analysis.comparison.best_setting import best_settings, is_decided
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.findings.verdict_sentences import summary_verdict
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.studies.study_analysis import AnalysisCache

WASTE, LEFT = ("kv_waste_pct", "%", "lower"), ("left_pct", "% of RAM", "higher")
GOODPUT = ("goodput_req_s", "req/s", "higher")
MEASURED = ("preemptions", "requests", "lower")
LIGHT, HEAVY = "decode, 64 reqs, ctx 128", "prefill, 8 × 512"
SETTINGS = ["binary_search", "half", "same"]


@pytest.fixture
def make_sweep(make_cell):
    """Return a function that writes a sweep, in which the cases ``estimates`` are out of reach."""

    def make(*estimates):
        effects = {"half": 0.5, "same": 1.0}
        path = make_cell(
            f"{len(estimates)}{estimates[:1] == (LIGHT,)}/cell", effects=effects, identity="none",
            claims=False, design={"estimates": dict.fromkeys(estimates, 700.0)},
        )  # fmt: skip
        manifest = json.loads((path / "cell.json").read_text())
        manifest["sweep"] = {"engine.attention.resolver": SETTINGS}
        (path / "cell.json").write_text(json.dumps(manifest))
        return path

    return make


def test_alpha_is_divided_among_the_rows_of_a_sweep(make_sweep):
    assert [one.level for one in analyse(make_sweep()).best] == [0.975, 0.975]


@pytest.mark.parametrize("estimate", [LIGHT, HEAVY])
def test_nothing_is_claimed_of_a_row_that_is_only_estimated(make_sweep, estimate):
    path = make_sweep(estimate)
    analysis = analyse(path)
    (claimed,) = [one for one in analysis.best if one.case != estimate]
    (estimated,) = [one for one in analysis.best if one.case == estimate]
    assert (claimed.level, claimed.possibly_best, claimed.withheld) == (0.95, ("half",), None)
    assert (estimated.best, estimated.withheld) == ("half", OUT_OF_REACH)
    assert (estimated.level, estimated.ci_pct, estimated.possibly_best) == (None, None, ())
    findings = plan_findings(analysis)
    assert summary_verdict(findings).text == "best setting known in 1 of 2 rows"
    assert short_answer(findings).startswith("Best is half: ")
    cache = AnalysisCache()
    assert cache.undecided_cases(path) == [] and cache.possibly_best(path) == ["half"]


def test_a_sweep_of_estimates_keeps_all_its_settings(make_sweep):
    path = make_sweep(LIGHT, HEAVY)
    cache = AnalysisCache()
    assert {one.withheld for one in cache.cell(path).best} == {OUT_OF_REACH}
    assert cache.undecided_cases(path) == [LIGHT, HEAVY]
    assert cache.possibly_best(path) == [*SETTINGS, "control"]
    assert summary_verdict(plan_findings(cache.cell(path))).kind == "estimate_only"


def best_of(metric, blocks=8, noise=0.0, dropped=(), **values):
    """Return the best setting of arms ``one`` (the baseline), ``two``, ... with these values."""
    row = MetricRow("all", *metric, primary=True)
    for arm, value in values.items():
        row.arms[arm] = [
            RunValue(block, 0, f"runs/{block}", value * (1 + noise * (block % 3 - 1)))
            for block in range(blocks)
        ]
    baseline, *others = values
    data = SimpleNamespace(
        baseline=baseline, treatment_arms=others, dropped=dict.fromkeys(dropped, 4),
        criteria_of=lambda case: DecisionCriteria(1, 0.05, 2.0), estimates_at=lambda look: {},
    )  # fmt: skip
    (best,) = best_settings(SimpleNamespace(rows=[row], data=data, causes=lambda *_: []))
    return best


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_best_of_computed_values_may_be_0(blocks):
    """It had no answer, because no value could be divided by it."""
    best = best_of(WASTE, blocks, one=0.0, two=12.0, three=30.0)
    assert (best.best, best.reference, best.excluded, best.withheld) == ("one", "two", {}, None)
    assert best.values == {"one": 0.0, "two": 12.0, "three": 30.0} and best.effect_pct == -100
    assert best.is_computed and is_decided([best])
    best = best_of(WASTE, blocks, one=30.0, two=0.0, three=0.0)
    assert best.possibly_best == ("two", "three") and best.reference == "one" and best.is_decided
    best = best_of(LEFT, blocks, one=-5.0, two=30.0, three=20.0)
    assert (best.best, best.reference, best.effect_pct) == ("two", "one", None)
    best = best_of(LEFT, blocks, one=20.0, two=20.0)
    assert best.possibly_best == ("one", "two") and best.reference == "two"


def test_a_measured_0_leaves_out_its_own_setting_only_where_it_cannot_be_the_best():
    best = best_of(GOODPUT, noise=0.01, one=4.0, two=8.0, three=0.0)
    assert best.excluded == {"three": "a value is not above 0"} and best.best == "two"
    assert not best.is_computed and best.is_decided
    best = best_of(MEASURED, noise=0.01, one=4.0, two=8.0, three=0.0)
    assert best.best is None and best.excluded == {
        "one": "a value of three is not above 0", "two": "a value of three is not above 0",
        "three": "a value is not above 0",
    }  # fmt: skip


def test_a_row_that_is_out_of_reach_keeps_no_sweep_from_its_answer():
    decided = BestInRow(
        "light",
        "us",
        "us",
        "lower",
        best="a",
        possibly_best=("a",),
        ci_low_pct=1.0,
        ci_high_pct=2.0,
    )
    heavy = replace(decided, case="heavy", possibly_best=(), withheld=OUT_OF_REACH)
    assert is_decided([heavy, decided]) and not is_decided([heavy])
    assert not is_decided([decided, replace(decided, possibly_best=("a", "b"))])
