"""Families of rows and limits of verdicts, each tested on both sides of its limit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from planted_cells import caveats
from shift_interval import confidence_interval

from labkit.analysis import analyse_cell, write_study
from labkit.analysis.comparison import cell_analysis
from labkit.analysis.comparison.arm_comparison import (
    DecisionCriteria,
    compare_arm,
    paired_rows,
    paired_tests,
)
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.observations import MetricRow, RunValue, log_values, probe_values
from labkit.analysis.comparison.output_identity import OutputAgreement, above_noise_floor
from labkit.analysis.comparison.verdict import (
    DIRECTIONS_DIFFER,
    NOISE_EXCEEDS_MARGIN,
    blocks_to_decide,
    judge,
    target_effect_pct,
)
from labkit.analysis.model.result_row import Comparison
from labkit.analysis.number_format import bound_text
from labkit.analysis.robustness.disturbed_runs import disturbed_blocks
from labkit.analysis.statistics.equivalence_test import Equivalence
from labkit.analysis.statistics.hodges_lehmann import to_percent
from labkit.analysis.statistics.multiple_comparisons import joint_p_values
from labkit.analysis.statistics.permutation_test import relabellings
from labkit.analysis.statistics.power import mde_pct
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.study_analysis import AnalysisCache, study_family
from labkit.records import CaseRecord

LEVELS = DecisionCriteria(2, 0.05, 2.0)


def comparison_of(cell, arm="seq_map", row=0):
    return next(c for c in cell["rows"][row]["comparisons"] if c["arm"] == arm)


def test_the_verdict_follows_the_adjusted_p():
    one = Comparison(
        "b", "a", -5.0, -9.0, 1.0, p=0.01, p_adjusted=0.2, p_floor=2 / 1296, mde_pct=6.0,
        alpha_row=0.01, sd=0.03, blocks=4, equivalence=Equivalence(0.9, 9.0),
    )  # fmt: skip
    verdict = judge(one, "lower", LEVELS, [], None)
    assert verdict.word == "inconclusive"
    assert verdict.reason.startswith("p = 0.01 for this row alone, 0.2 adjusted")
    assert judge(replace(one, p_adjusted=0.05), "lower", LEVELS, [], None).word == "better"


def test_no_direction_is_claimed_that_the_interval_excludes():
    """A quarter of the head's runs are slow by 20 %, the others .6 % faster: the mean is slower."""
    noise = np.random.default_rng(1).normal(1, 0.001, (2, 24))
    head = 0.994 * noise[1]
    head[:6] *= 1.2
    row = MetricRow("all", "request_s", "s", "lower", True)
    for name, values in (("base", noise[0]), ("head", head)):
        row.arms[name] = [RunValue(block, 0, "", float(x)) for block, x in enumerate(values)]
    criteria = DecisionCriteria(1, 0.05, 2.0)
    (one,) = compare_arm([row], "head", "base", criteria)
    assert one.p_adjusted <= 0.05 and one.effect_pct < 0 < one.ci_low_pct
    verdict = judge(one, "lower", criteria, (), None)
    assert (verdict.word, verdict.reason) == ("inconclusive", DIRECTIONS_DIFFER)
    assert judge(replace(one, effect_pct=3.0), "lower", criteria, (), None).word == "worse"
    # Within a wider margin, a direction would be printed beside "trivial".
    wide = replace(criteria, margin_pct=20.0)
    (one,) = compare_arm([row], "head", "base", wide)
    verdict = judge(one, "lower", wide, (), None)
    assert (verdict.word, verdict.reason) == ("inconclusive", DIRECTIONS_DIFFER)
    assert judge(replace(one, effect_pct=3.0), "lower", wide, (), None).word == "trivial"


def test_equivalence_is_claimed_at_alpha_and_not_at_twice_alpha():
    one = Comparison(
        "b", "a", 0.5, -1.0, 1.9, p=0.4, p_adjusted=0.4, p_floor=2 / 1296, mde_pct=2.0,
        alpha_row=0.05, sd=0.01, blocks=4, equivalence=Equivalence(0.05, 1.9),
    )  # fmt: skip
    assert judge(one, "lower", LEVELS, [], None).word == "equivalent"
    wide = replace(one, equivalence=Equivalence(0.06, 2.1))
    assert judge(wide, "lower", LEVELS, [], None).word == "inconclusive"
    # Noise of just the margin does not exceed it.
    for low, high, exceeds in ((-1.0, 2.0, False), (-2.0, 1.0, False), (-2.01, 1.0, True)):
        control = Comparison("control", "a", ci_raw_low_pct=low, ci_raw_high_pct=high)
        verdict = judge(one, "lower", LEVELS, [], control)
        assert verdict.word == ("inconclusive" if exceeds else "equivalent")
        assert (verdict.reason == NOISE_EXCEEDS_MARGIN) is exceeds
    assert judge(one, "lower", LEVELS, [], Comparison("control", "a")).word == "equivalent"


def test_a_design_whose_smallest_p_is_just_alpha_may_claim():
    one = Comparison(
        "b", "a", -5.0, -9.0, -1.0, p=0.05, p_adjusted=0.05, p_floor=0.05, mde_pct=6.0,
        alpha_row=0.01, sd=0.03, blocks=4, equivalence=Equivalence(0.9, 9.0),
    )  # fmt: skip
    assert judge(one, "lower", LEVELS, [], None).word == "better"
    verdict = judge(replace(one, p_floor=0.0501), "lower", LEVELS, [], None)
    assert verdict.word == "estimate_only" and "cannot reach p = 0.05" in verdict.reason


@pytest.mark.parametrize(("sd", "larger"), [(0.05, True), (0.005, False)])
def test_only_a_larger_study_than_the_present_one_is_suggested(sd, larger):
    one = Comparison(
        "b", "a", 3.0, -1.0, 7.0, p=0.2, p_adjusted=0.2, p_floor=2 / 1296, mde_pct=6.0,
        alpha_row=0.05, sd=sd, blocks=8, equivalence=Equivalence(0.9, 7.0),
    )  # fmt: skip
    reason = judge(one, "lower", LEVELS, [], None).reason
    assert reason.startswith("smallest detectable effect: 6.0 %")
    assert ("a new study of about" in reason) is larger


def test_the_stated_bound_is_that_of_the_shown_interval(make_cell):
    c = comparison_of(analyse_cell(make_cell(effects={"seq_map": 1.0}, noise=0.004)))
    bound = max(-c["ci_low_pct"], c["ci_high_pct"])
    assert c["reason"] == f"any difference is within ±{bound_text(bound)} %"


def test_rows_have_noise_of_their_own_and_an_adjusted_p_above_the_raw(make_cell):
    cell = analyse_cell(make_cell(effects={"seq_map": 0.99}, noise=0.01))
    for i in range(2):
        c = comparison_of(cell, row=i)
        assert c["p_adjusted"] > 1.2 * c["p"]
        assert c["ci_low_pct"] < c["ci_raw_low_pct"] < c["ci_raw_high_pct"] < c["ci_high_pct"]
        assert c["level"] == 0.95 and 0.02 < c["alpha_row"] < 0.06


def test_other_metrics_are_a_family_of_their_own(make_cell):
    """The p of one primary row is not adjusted for rows that are not primary."""
    options = {"requests": True, "effects": {"seq_map": 1.005}, "noise": 0.01}
    cell = analyse_cell(make_cell(**options))
    primary = [row["primary"] for row in cell["rows"]]
    assert primary == [True, False, False, False]
    own = comparison_of(cell)
    assert own["p_adjusted"] == own["p"] and own["ci_low_pct"] == own["ci_raw_low_pct"]
    others = [comparison_of(cell, row=i) for i in (1, 2)]
    assert all(c["p_adjusted"] > c["p"] for c in others)


def test_the_study_s_family_counts_its_arms(make_cell):
    effects = {"seq_map": 0.99, "identity": 1.0}
    for name, seed in (("s/a", 1), ("s/b", 2)):
        path = make_cell(name, effects=effects, noise=0.01, seed=seed, control=False)
    analyses = AnalysisCache().study(path.parent)
    tests = [
        list(paired_tests(paired_rows(a.rows, arm.name, "binary_search", 2, True), 2).values())
        for a in analyses
        for arm in a.data.arms[1:]
    ]
    expected = [min(1.0, 2 * p) for ps in joint_p_values(tests) for p in ps]
    family = study_family(list(map(cell_summary, analyses)))
    assert [one.p_adjusted for one in family] == pytest.approx(expected)
    assert min(expected) < 1.0


def test_more_arms_lower_each_row_s_alpha_and_power(make_cell):
    one = comparison_of(analyse_cell(make_cell("a/one", effects={"seq_map": 1.0})))
    effects = {"seq_map": 1.0, "third": 1.0, "fourth": 1.0}
    three = comparison_of(analyse_cell(make_cell("a/three", effects=effects)))
    assert 0.15 < three["alpha_row"] / one["alpha_row"] < 0.5
    assert three["mde_pct"] == pytest.approx(mde_pct(three["sd"], 4, 2, three["alpha_row"]))
    assert three["p_floor"] == pytest.approx(3 * one["p_floor"])


def test_an_interval_at_a_look_has_the_look_s_level(make_cell):
    looks = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]
    path = make_cell(looks=looks, effects={"seq_map": 0.9})
    assert comparison_of(analyse_cell(path))["level"] == 0.99
    write_study(path.parent, plots=False)
    report = (path.parent / "report.md").read_text()
    assert "99 % CI" in report


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_all_intervals_and_bounds_have_the_level_of_the_criteria(make_cell, alpha):
    """A row alone is its own family: both intervals are the same, and so is the bound."""
    analysis = analyse(make_cell(cases=("a",), alpha=alpha, effects={"seq_map": 1.0}))
    one = analysis.comparisons[0]["seq_map"]
    pair = (log_values(analysis.rows[0], arm, range(4)) for arm in ("binary_search", "seq_map"))
    limits = confidence_interval(*pair, alpha)
    assert one.ci_raw_pct == one.ci_pct == pytest.approx(tuple(map(to_percent, limits)))
    assert one.equivalence.bound_pct == max(map(abs, one.ci_pct))
    assert one.level == 1 - alpha


def test_a_block_without_a_difference_is_no_win(make_cell):
    same = analyse(make_cell(cases=("a",), effects={"seq_map": 1.0}, noise=0.0))
    assert same.comparisons[0]["seq_map"].wins == 0


def test_a_row_that_lacks_a_block_is_relabelled_as_the_others_in_its_own_blocks(make_cell):
    def lacking(record):
        if record.block != 1:
            return record
        return replace(record, cases=(record.cases[0], CaseRecord("b", "too large")))

    rows = analyse(make_cell(cases=("a", "b"), change=lacking)).rows
    tests = paired_tests(paired_rows(rows, "seq_map", "binary_search", 2, True), 2)
    labels = relabellings(4, 2)
    assert np.array_equal(tests[0].labels.signs, labels.signs)
    expected = labels.restrict_to_blocks([0, 2, 3]).signs
    assert np.array_equal(tests[1].labels.signs, expected)


def test_the_control_is_not_adjusted_for_the_number_of_arms(make_cell):
    cell = analyse_cell(make_cell(cases=("a",), effects={"one": 1.0, "two": 1.0}, noise=0.02))
    control = comparison_of(cell, "control")
    assert control["p_adjusted"] == control["p"] > control["p_floor"] == 2 / 1296
    one = comparison_of(cell, "one")
    assert one["p_adjusted"] == pytest.approx(min(1, 2 * one["p"]), rel=1e-3)


def test_a_block_is_done_when_all_its_runs_have_records(make_cell):
    def lacking(record):
        return None if (record.block, record.position) == (2, 5) else record

    assert analyse(make_cell()).data.blocks_done == (0, 1, 2, 3)
    assert analyse(make_cell("lacking/cell", change=lacking)).data.blocks_done == (0, 1, 3)


def test_the_identity_gate_is_tested_at_the_design_s_alpha(make_cell, monkeypatch):
    levels = []
    original = cell_analysis.validity_gates.identical
    monkeypatch.setattr(
        cell_analysis.validity_gates,
        "identical",
        lambda *args: levels.append(args[3]) or original(*args),
    )
    analyse(make_cell(alpha=0.03))
    assert levels == [0.03]


def test_a_study_with_blocks_still_to_run_claims_nothing(make_cell):
    path = make_cell(change=lambda r: None if r.block == 3 else r)
    c = comparison_of(analyse_cell(path))
    assert c["verdict"] == "estimate_only" and "3 of 4 blocks are done" in c["reason"]
    assert c["p"] is not None and c["p_adjusted"] is None and c["ci_low_pct"] is None
    assert analyse_cell(path)["design"]["shown"] == []


def test_an_exploratory_study_says_so_before_its_numbers(make_cell):
    path = make_cell(blocks=6)
    file = path / "cell.json"
    facts = json.loads(file.read_text())
    facts["design"]["shown"] = [4]
    file.write_text(json.dumps(facts))
    reason = "exploratory: blocks were added after results were shown (4 -> 6)"
    assert reason in caveats(analyse(path))
    c = comparison_of(analyse_cell(path))
    assert (c["verdict"], c["reason"]) == ("estimate_only", reason)
    assert study_family([cell_summary(analyse(path))]) == []


def test_the_probe_is_the_mean_of_logarithms(make_cell):
    record = analyse(make_cell()).data.records[0]
    slow = replace(record, probe={"before": {"matmul_us": 1.0, "copy_us": np.exp(3.0)}})
    assert probe_values([slow]) == {(record.block, record.position): pytest.approx(1.5)}


def test_each_run_of_a_block_has_its_own_probe(make_cell):
    records = analyse(make_cell(blocks=1)).data.records
    probed = [replace(r, probe={"before": {"copy_us": float(np.exp(r.position))}}) for r in records]
    expected = {(0, position): pytest.approx(position) for position in range(len(records))}
    assert len(records) == 6 and probe_values(probed) == expected


@pytest.mark.parametrize(
    ("effect", "target"),
    [(7.46, 7.5), (-7.46, -7.5), (0.3, 1.0), (-0.3, -1.0), (-1.02, -1.0), (-99.97, -99.9)],
)
def test_a_new_study_is_to_detect_the_size_of_an_effect_in_either_direction(effect, target):
    assert target_effect_pct(effect) == target


def test_a_decrease_needs_fewer_blocks_than_an_increase_by_as_many_percent():
    """A half is as far from the whole as its double."""
    one = Comparison("b", "a", -50.0, alpha_row=0.05, sd=0.4, blocks=8)
    double, more = replace(one, effect_pct=100.0), replace(one, effect_pct=50.0)
    assert blocks_to_decide(one, LEVELS) == blocks_to_decide(double, LEVELS)
    assert blocks_to_decide(one, LEVELS) < blocks_to_decide(more, LEVELS)


def test_the_noise_floor_is_tested_on_one_side():
    """Five misses of ten against one: p = 0.07 on one side, 0.14 on two."""
    arm, control = (
        OutputAgreement(name, agree, 10, 1.0) for name, agree in (("arm", 5), ("control", 9))
    )
    above = above_noise_floor(arm, control, 0.08)
    assert above is not None and "Fisher p = 0.07" in above
    assert above_noise_floor(arm, control, 0.06) is None
    assert above_noise_floor(control, arm, 0.9) is None  # below the floor is not above it


@pytest.mark.parametrize(("mib", "status"), [(15.9, "pass"), (16.1, "fail")])
def test_swap_may_grow_by_sixteen_mib(make_cell, mib, status):
    def swapping(record):
        start = {**record.environment, "swap": {"used_bytes": 5 << 20}}
        end = {**record.environment_end, "swap": {"used_bytes": int((5 + mib) * 2**20)}}
        return replace(record, environment=start, environment_end=end)

    assert analyse_cell(make_cell(change=swapping))["gates"]["healthy"]["status"] == status


def disturbed(make_cell, change):
    return disturbed_blocks(analyse(make_cell(change=change)).data.records)


@pytest.mark.parametrize(("percent", "out"), [(4, False), (6, True)])
def test_a_block_with_over_five_percent_steal_is_disturbed(make_cell, percent, out):
    def stolen(record):
        ticks = {"user": 100 - percent, "steal": percent if record.block == 1 else 0}
        return replace(
            record,
            environment={**record.environment, "cpu_ticks": {"user": 0, "steal": 0}},
            environment_end={**record.environment_end, "cpu_ticks": ticks},
        )

    assert set(disturbed(make_cell, stolen)) == ({1} if out else set())


@pytest.mark.parametrize(("factor", "out"), [(1.09, False), (1.11, True)])
def test_a_block_with_a_probe_over_a_tenth_slower_is_disturbed(make_cell, factor, out):
    def slow(record):
        us = 100.0 * (factor if (record.block, record.position) == (2, 0) else 1.0)
        return replace(record, probe={"before": {"matmul_us": us}})

    assert set(disturbed(make_cell, slow)) == ({2} if out else set())


def test_only_the_rows_that_are_asked_for_are_compared(make_cell):
    """Alternative rows, which include stalls, are needed where they differ."""
    analysis = analyse(make_cell(requests=True, blocks=3))
    facts = analysis.rows, "seq_map", analysis.data.baseline, analysis.data.criteria
    every, first = compare_arm(*facts), compare_arm(*facts, only={0})
    assert first[0] == every[0] and every[0].p is not None
    assert any(one.p for one in every[1:]) and not any(one.p for one in first[1:])
