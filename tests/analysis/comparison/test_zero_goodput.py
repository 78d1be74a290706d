"""A goodput of 0 is a result, as is 0 of other metrics: of its own arm, and of no other."""

from dataclasses import replace

import pytest

from labkit import report
from labkit.analysis.charts.run_and_effect_charts import paired_differences, variation_sentence
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.findings.verdict_sentences import verdict_sentences
from labkit.analysis.pages.report_files import FORMATS
from labkit.analysis.robustness.sensitivity_analysis import sensitivity_results
from labkit.records import Metric

NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.002, 0.997, 1.004)
FULL = dict.fromkeys(("binary_search", "fast", "slow", "control"), 10.0)


def with_goodput(rates, zero_in=None):
    """Return a change of records: an arm's goodput is its rate, or 0 in the block ``zero_in``."""

    def change(record):
        noise = NOISE[(record.block + record.position) % 8]
        value = 0.0 if record.block == zero_in and record.arm == "slow" else noise
        metric = Metric("goodput_req_s", "req/s", "higher", True, (rates[record.arm] * value,))
        (case,) = record.cases
        return replace(record, cases=(replace(case, metrics=(metric,)),))

    return change


@pytest.fixture
def analysed(make_cell):
    def analyse_rates(isolation="process", zero_in=None, blocks=8, **rates):
        change = with_goodput({**FULL, **rates}, zero_in)
        cell = make_cell(
            f"study{len(rates)}/one", requests=True, blocks=blocks, runs=1, change=change,
            effects={"fast": 1.0, "slow": 1.0}, isolation=isolation, metrics=["goodput_req_s"],
        )  # fmt: skip
        return analyse(cell)

    return analyse_rates


def judged(analysis):
    return {one.arm: one for one in analysis.cell.comparisons}


@pytest.mark.parametrize("isolation", ["process", "in_process"])
def test_an_arm_with_zero_goodput_is_lower_by_100_percent_and_others_keep_their_answer(
    analysed, isolation
):
    plain = judged(analysed(isolation, fast=12.0))
    analysis = analysed(isolation, fast=12.0, slow=0.0)
    arms = judged(analysis)
    assert arms["fast"] == plain["fast"]  # by ratios, as before
    assert arms["control"] == plain["control"]
    slow = arms["slow"]
    assert slow.verdict == "worse"
    assert slow.effect_pct == pytest.approx(-100, abs=0.5)
    assert slow.ci_pct[0] >= -100 and slow.ci_pct[1] < -98
    text = "\n".join(
        [long_text(plan_findings(analysis)), *verdict_sentences(analysis.cell, "none")]
    )
    assert "slow serves 100 % fewer requests within the limits" in text and "above 0" not in text
    assert "slow" not in {result.arm for result in sensitivity_results(analysis)}
    (row,) = analysis.rows
    pairs = paired_differences(row, "slow", "binary_search", 1)
    assert all(-100 <= pct < -98 for pct in pairs.values())
    assert variation_sentence(row, "slow", "slow", pairs.values()) is None


def test_a_run_with_zero_goodput_counts_as_a_difference(analysed):
    """One of eight runs has 0, so on average an eighth is lost, and nothing is proved."""
    slow = judged(analysed(zero_in=3))["slow"]
    assert slow.verdict == "inconclusive" and slow.blocks == 8
    low, high = slow.ci_pct
    assert low < -10 and high > -1


@pytest.mark.parametrize(
    ("isolation", "arms", "word"),
    [
        ("process", {"fast": 12.0}, "better"),
        ("in_process", {"fast": 12.0}, "better"),
        ("process", {"fast": 0.0}, "inconclusive"),
    ],
)
def test_an_arm_is_compared_with_a_baseline_without_goodput_in_the_metrics_unit(
    analysed, isolation, arms, word
):
    analysis = analysed(isolation, binary_search=0.0, control=0.0, slow=0.0, **arms)
    fast = judged(analysis)["fast"]
    assert fast.verdict == word and judged(analysis)["slow"].verdict == "inconclusive"
    (row,) = [row for row in analysis.cell.to_json()["rows"] if row["primary"]]
    (one,) = [one for one in row["comparisons"] if one["arm"] == "fast"]
    (measured,) = analysis.rows
    assert paired_differences(measured, "fast", "binary_search", 1) == {}
    unknown = ("effect_pct", "ci_low_pct", "ci_raw_high_pct", "mde_pct", "sd")
    assert [one[name] for name in unknown] == [None] * 5
    assert (one["p_adjusted"] <= 0.05) is (word == "better") and one["blocks"] == 8
    start = "binary_search has 0 req/s in every run, so no effect in percent of it exists; fast has"
    assert one["reason"].startswith(start)
    findings = plan_findings(analysis)
    texts = [long_text(findings), short_answer(findings)]
    texts += verdict_sentences(analysis.cell, "none")
    assert start in "\n".join(texts)
    if word == "better":
        assert one["difference"] == pytest.approx(12, rel=0.01)
        assert "CI of the difference 11.92 to 12.06 req/s)" in one["reason"]
        assert all("11.96 req" in text and "more" in text for text in texts[:2]), texts[1]


def test_too_few_blocks_from_a_baseline_without_goodput_are_an_estimate_everywhere(analysed):
    analysis = analysed(binary_search=0.0, control=0.0, slow=0.0, fast=12.0, blocks=4)
    fast = judged(analysis)["fast"]
    assert fast.verdict == "estimate_only"
    start = "4 blocks of 1: a claim needs at least 6; binary_search has 0 req/s in every run, "
    assert fast.reason.startswith(start)
    lines = "\n".join(verdict_sentences(analysis.cell, "none"))
    assert f"fast: estimate-only: {start}" in lines


def test_every_format_shows_an_effect_without_a_percentage(analysed, capsys):
    study = analysed(binary_search=0.0, control=0.0, fast=12.0).data.dir.parent
    assert report.main([str(study)]) == 0
    for name in FORMATS:
        if name != "pyperf":  # it has times only
            assert report.main([str(study), "--format", name]) == 0
    assert "11.96 req" in capsys.readouterr().out
    assert "nan" not in (study / "report.md").read_text().replace("tenant", "")


@pytest.mark.parametrize(
    ("value", "word", "effect"), [(0.0, "worse", -100.0), (-3.0, "inconclusive", None)]
)
@pytest.mark.parametrize("isolation", ["process", "in_process"])
def test_a_value_that_is_not_above_0_leaves_the_other_arms_their_answers(
    make_cell, isolation, value, word, effect
):
    """No arm was compared of a metric of one's own; later, none with 0 was."""

    def change(record):
        record = with_goodput({**FULL, "fast": 12.0, "slow": value})(record)
        (case,) = record.cases
        own = tuple(replace(m, name="my_score", unit="points") for m in case.metrics)
        return replace(record, cases=(replace(case, metrics=own),))

    arms = judged(
        analyse(
            make_cell(
                requests=True, blocks=8, runs=1, change=change, isolation=isolation,
                effects={"fast": 1.0, "slow": 1.0}, metrics=["my_score"],
            )
        )
    )  # fmt: skip
    assert arms["fast"].verdict == "better" and arms["fast"].effect_pct == pytest.approx(20, abs=1)
    assert arms["control"].effect_pct == pytest.approx(0, abs=1)
    assert arms["slow"].verdict == word
    assert arms["slow"].effect_pct == (effect and pytest.approx(effect, abs=0.5))


def test_constant_values_of_a_computed_metric_are_compared_where_another_arm_s_vary(make_cell):
    def change(record):
        value = {"fast": 0.0, "slow": 10.0 + record.block}.get(record.arm, 12.0)
        metric = Metric("kv_waste_pct", "%", "lower", True, (value,))
        (case,) = record.cases
        return replace(record, cases=(replace(case, metrics=(metric,)),))

    cell = make_cell(
        requests=True, blocks=8, runs=1, change=change, metrics=["kv_waste_pct"],
        effects={"fast": 1.0, "slow": 1.0},
    )  # fmt: skip
    arms = judged(analyse(cell))
    assert arms["fast"].verdict == "better" and arms["fast"].effect_pct == -100
    assert arms["control"].verdict == "equivalent"
    assert arms["slow"].verdict == "inconclusive" and arms["slow"].effect_pct > 0
