"""The verdict on a whole cell, for every mix of verdicts on rows."""

from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.gates import Gate
from labkit.analysis.comparison.observations import MetricRow
from labkit.analysis.findings.summary_verdict import summary_verdict

LATENCY = MetricRow("all", "e2e_p50_ms", "ms", "lower", True)
KERNEL = MetricRow("a", "dispatch_us", "us", "lower", True)
SECONDARY = MetricRow("a", "dispatch_us", "us", "lower", False)


def judge(row, arm, word):
    return SimpleNamespace(
        row=row, comparison=SimpleNamespace(arm=arm), verdict=SimpleNamespace(word=word)
    )


def cell(*words, row=KERNEL, arms=("map",), sweep=None, best=(), metrics=("dispatch_us",), **gates):
    judged = [judge(row, "map", word) for word in words]
    judged += [judge(SECONDARY, "map", "slower"), judge(KERNEL, "control", "slower")]  # not counted
    data = SimpleNamespace(sweep=sweep or {}, metrics=metrics, treatment_arms=list(arms))
    results = {name: Gate(status, ()) for name, status in gates.items()}
    return SimpleNamespace(data=data, judged=judged, best=best, gates=results)


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (["faster", "faster"], "faster", "faster"),
        (["faster", "equivalent", "invalid"], "faster", "faster in 1 of 3 rows"),
        (["slower", "inconclusive"], "slower", "slower in 1 of 2 rows"),
        (["faster", "slower"], "mixed", "mixed"),
        (["equivalent", "trivial"], "equivalent", "no difference"),
        (["equivalent", "trivial", "inconclusive"], "equivalent", "no difference in 2 of 3 rows"),
        (["inconclusive"], "inconclusive", "undecided"),
        (["estimate_only", "invalid"], "estimate_only", "estimate only"),
        (["computed"], "computed", "computed"),
        (["computed", "faster"], "faster", "faster"),
        (["invalid"], "invalid", "no answer"),
        ([], "invalid", "no answer"),
    ],
)
def test_every_mix_of_verdicts_has_its_summary(words, kind, text):
    summary = summary_verdict(cell(*words))
    assert (summary.kind, summary.text) == (kind, text)


def test_several_arms_have_comparisons_not_rows():
    several = cell("faster", "inconclusive", arms=("map", "other"))
    assert summary_verdict(several).text == "faster in 1 of 2 comparisons"


def test_a_latency_is_lower_not_faster():
    assert summary_verdict(cell("faster", row=LATENCY)).text == "lower"


def test_without_an_arm_there_is_nothing_to_compare():
    assert summary_verdict(cell(arms=())).kind == "none"


@pytest.mark.parametrize(
    ("withheld", "possibly", "kind"),
    [
        (None, ["a"], "faster"),
        (None, ["a", "b"], "inconclusive"),
        ("too few blocks", ["a"], "estimate_only"),
    ],
)
def test_a_sweep_is_decided_if_one_setting_is_best(withheld, possibly, kind):
    best = [SimpleNamespace(best="a", withheld=withheld, possibly_best=possibly)]
    assert summary_verdict(cell(sweep={"x": [1, 2]}, best=best)).kind == kind
    assert summary_verdict(cell(sweep={"x": [1, 2]})).text == "no answer"


@pytest.mark.parametrize(
    ("status", "text"),
    [("pass", "as claimed"), ("fail", "not as claimed"), ("unclaimed", "no answer")],
)
def test_a_question_about_outputs_is_answered_by_the_gate(status, text):
    assert summary_verdict(cell(metrics=("outputs",), identical=status)).text == text
