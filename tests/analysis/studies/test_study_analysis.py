"""Studies of many cells: what counts as decided, the exit code and the family of all cells."""

from dataclasses import replace

import numpy as np
import pytest

from labkit.analysis import exit_code
from labkit.analysis.comparison.arm_comparison import paired_rows, paired_tests
from labkit.analysis.statistics.multiple_comparisons import joint_p_values
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.study_analysis import AnalysisCache, study_family, summarise_study


@pytest.mark.parametrize(
    ("options", "decided"),
    [
        ({}, True),
        ({"effects": {"seq_map": 0.9, "same": 1.0}, "noise": 0.02}, False),
        ({"effects": {}}, False),
        ({"skipped": {"prefill, 8 × 512": "too large"}}, True),
        ({"requests": True, "effects": {"seq_map": 0.8}, "noise": 0.01}, True),
    ],
    ids=["all arms", "one arm of two", "no arm", "a skipped row", "only the primary row"],
)
def test_a_cell_is_decided_when_every_arm_is_in_every_primary_row(make_cell, options, decided):
    cell = make_cell(**options)
    words = {
        (row.primary, one.arm): one.verdict for row, one in AnalysisCache().cell(cell).cell.compared
    }
    assert (not AnalysisCache().undecided_cases(cell)) is decided, words


def test_an_undecided_control_or_secondary_row_leaves_a_cell_decided(make_cell):
    def noisy(record):
        rng = np.random.default_rng([record.block, record.position])
        (case,) = record.cases
        metrics = tuple(
            m if m.primary else replace(m, repeats=(float(np.exp(rng.normal())),))
            for m in case.metrics
        )
        return replace(record, cases=(replace(case, metrics=metrics),))

    cell = make_cell(requests=True, effects={"seq_map": 0.5}, noise=0.06, change=noisy)
    cache = AnalysisCache()
    words = {(row.metric, one.arm): one.verdict for row, one in cache.cell(cell).cell.compared}
    assert words["total_tok_s", "seq_map"] == "worse" and not cache.undecided_cases(cell)
    assert words["total_tok_s", "control"] == words["ttft_p50_ms", "seq_map"] == "inconclusive"


def test_one_cell_that_fails_makes_the_exit_code_1(make_cell):
    make_cell("s/a")
    unfinished = make_cell("s/b", change=lambda r: None if r.block == 3 else r)
    assert exit_code(unfinished) == exit_code(unfinished.parent) == 1
    assert exit_code(unfinished.with_name("a")) == 0


def test_a_family_of_cells_is_adjusted_for_the_largest_number_of_arms(make_cell):
    options = {"noise": 0.01, "control": False}
    make_cell("s/a", effects={"seq_map": 0.99}, **options)
    three = {"seq_map": 0.99, "x": 1.0, "y": 1.0}
    path = make_cell("s/b", effects=three, seed=2, **options)
    analyses = AnalysisCache().study(path.parent)
    tests = [
        list(paired_tests(paired_rows(a.rows, arm, "binary_search", 2, True), 2).values())
        for a in analyses
        for arm in a.data.treatment_arms
    ]
    expected = [min(1.0, 3 * p) for ps in joint_p_values(tests) for p in ps]
    cells = list(map(cell_summary, analyses))
    family = study_family(cells)
    assert [one.p_adjusted for one in family] == pytest.approx(expected)
    assert list(summarise_study(path.parent, cells).family) == family
    assert summarise_study(path, cells[:1]).family == ()


def test_a_goodput_of_0_leaves_no_arm_out_of_the_family(make_cell):
    """The row left it, and the p of all others came from too small a family."""

    def change(record):
        rng = np.random.default_rng([record.block, record.position])
        value = 0.0 if (record.arm, record.block) == ("slow", 3) else 10.0 + rng.normal(0, 0.1)
        (case,) = record.cases
        metric = replace(case.metrics[0], name="goodput_req_s", unit="req/s", repeats=(value,))
        return replace(record, cases=(replace(case, metrics=(metric,)),))

    cells = [
        cell_summary(AnalysisCache().cell(make_cell(
            name, requests=True, blocks=8, runs=1, effects={"fast": 1.0, "slow": 1.0},
            metrics=["goodput_req_s"], change=change,
        )))
        for name in ("s/a", "s/b")
    ]  # fmt: skip
    members = [(one.cell, one.arm) for one in study_family(cells)]
    assert members == [(cell, arm) for cell in ("a", "b") for arm in ("fast", "slow")]
