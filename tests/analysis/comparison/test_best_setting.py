"""The best setting of a sweep, in rows that are tested and in rows that are only estimated."""

import json

import pytest

from labkit.analysis.comparison.arm_comparison import OUT_OF_REACH
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.findings.verdict_sentences import summary_verdict
from labkit.analysis.studies.study_analysis import AnalysisCache

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
