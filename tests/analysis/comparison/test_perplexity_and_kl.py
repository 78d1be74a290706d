"""Quality of arms that score texts: metrics by hand, and intervals with simulated coverage."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import planted_cell, section_table
from scipy import stats

from labkit.analysis.comparison import perplexity_and_kl, validity_gates
from labkit.analysis.comparison.output_identity import IdentityReport, OutputAgreement
from labkit.analysis.comparison.perplexity_and_kl import (
    IS_UPPER_LIMIT,
    KL_QUANTILES,
    ScoredWindows,
    broken_limits,
    text_qualities,
)
from labkit.analysis.findings.cell_findings import Findings
from labkit.analysis.findings.output_quality_sentences import (
    interval_text,
    quality_sentences,
    share_text,
    worth_clauses,
)
from labkit.analysis.model.cell_model import ArmQuality
from labkit.analysis.statistics.text_window_intervals import (
    Interval,
    block_jackknife,
    positive_interval,
    quantile_interval,
)
from labkit.analysis.tables.perplexity_and_kl_tables import quality_section
from labkit.analysis.tables.validity_tables import outputs_section
from labkit.config.experiment import QualityLimits
from labkit.records import Arm, CaseRecord, Record
from labkit.records.kl_histogram import RELATIVE_ERROR, encode_histogram

RNG = np.random.default_rng(0)
PLACE = {
    "kl": 0.5,
    "window": "text 1, token 0",
    "position": 3,
    "before": "a\n",
    "token": "b|",
    "after": "c",
    "baseline_top1": "d",
    "arm_top1": "e",
}


def windows(shift, count=32):
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, 30, count)
    return [
        {
            "window": str(i),
            "tokens": int(n),
            "nll": float(rng.uniform(2, 3) * n + shift * n),
            "kl": (shift * rng.exponential(size=n)).tolist(),
            "same_top1": int(n) - (int(rng.integers(0, 4)) if shift else 0),
            "probability_change_squared": float(shift * rng.uniform(0, 1)),
        }
        for i, n in enumerate(lengths)
    ]


def record(arm, shift, block=0, outcome="ok", top=64, **notes):
    notes = {
        "reference_top": top,
        "reference_rest": 0.0075,
        "windows": windows(shift),
        "worst": [PLACE] if shift else [],
        **notes,
    }
    return Record(
        arm=arm,
        role="baseline" if arm == "base" else "arm",
        block=block,
        position=0,
        seed=0,
        outcome=outcome,
        started="",
        detail=None if outcome == "ok" else "it crashed",
        cases=(CaseRecord("all", notes={"scoring": notes}),),
    )


RECORDS = [record("base", 0.0), record("lossy", 9.9, 0, "crashed"), record("lossy", 0.1, 1)]
ARMS = [{"name": "base", "role": "baseline"}, {"name": "lossy", "role": "arm"}]
CELL = planted_cell(arms=ARMS)


def scored(records=RECORDS, rows=()):
    """Return a cell with the qualities of records."""
    cell = planted_cell(rows, arms=ARMS)
    return replace(cell, quality=tuple(text_qualities(["base", "lossy"], records)))


def test_metrics_are_those_of_plain_sums():
    base, lossy = text_qualities(["base", "lossy"], RECORDS)
    ours, theirs = windows(0.1), windows(0.0)
    tokens = sum(w["tokens"] for w in ours)
    kl = np.concatenate([w["kl"] for w in ours])
    assert lossy.metrics["perplexity"].estimate == pytest.approx(
        math.exp(sum(w["nll"] for w in ours) / tokens)
    )
    assert lossy.metrics["perplexity_ratio"].estimate == pytest.approx(
        math.exp(sum(w["nll"] for w in ours) / tokens)
        / math.exp(sum(w["nll"] for w in theirs) / tokens)
    )
    assert lossy.metrics["kl_mean"].estimate == pytest.approx(kl.mean())
    got = [lossy.metrics[name].estimate for name in KL_QUANTILES]
    assert got == pytest.approx(np.quantile(kl, list(KL_QUANTILES.values())))
    assert lossy.metrics["top1_agreement"].estimate == pytest.approx(
        sum(w["same_top1"] for w in ours) / tokens
    )
    squares = sum(w["probability_change_squared"] for w in ours)
    assert lossy.metrics["probability_change"].estimate == pytest.approx(
        math.sqrt(squares / tokens)
    )
    assert base.metrics["kl_mean"] == Interval(0, 0, 0)
    assert base.metrics["perplexity_ratio"] == Interval(1, 1, 1)
    assert base.metrics["top1_agreement"] == Interval(1, 1, 1)


def test_a_histogram_gives_the_same_mean_and_the_quantiles_within_its_bound():
    older = ScoredWindows.from_notes(windows(0.1))
    notes = [
        {**w, "kl_sum": sum(w["kl"]), "kl_histogram": encode_histogram(values)}
        for w, values in zip(windows(0.1), older.kl, strict=True)
    ]
    for note in notes:
        del note["kl"]  # the list of older records
    records = [record("base", 0.1), record("lossy", 0.1, windows=notes)]
    exact, newer = text_qualities(["base", "lossy"], records, 0.95)
    assert newer.metrics["kl_mean"].estimate == pytest.approx(
        exact.metrics["kl_mean"].estimate, rel=1e-9
    )
    assert newer.metrics["kl_mean"].high == pytest.approx(exact.metrics["kl_mean"].high, rel=1e-9)
    for name in KL_QUANTILES:
        got, truth = newer.metrics[name], exact.metrics[name]
        assert got.estimate == pytest.approx(truth.estimate, rel=RELATIVE_ERROR * (1 + 1e-4))
        assert got.estimate != truth.estimate
    for name in ("kl_p50", "kl_p90"):  # of 800 positions, fewer than 10 are beyond the others
        got = newer.metrics[name]
        assert got.low < got.estimate < got.high
    assert {newer.metrics[name].low for name in ("kl_p99", "kl_p99_9")} == {None}


def parts(cell, records):
    """Return the section's charts and tables."""
    cell = replace(cell, quality=tuple(text_qualities(cell.real_arms, records)))
    found = quality_section.parts(SimpleNamespace(cell=cell, records=records))
    content = {"chart": "chart", "table": "table"}
    return [getattr(part, content[part.kind]) for part in found if part.kind in content]


def test_tables_have_a_line_per_arm_and_the_worst_places():
    table, places = parts(CELL, RECORDS)
    assert [table.cells(quality)[0] for quality in table.lines] == ["base", "lossy"]
    assert "32 windows" in table.notes[0] and "0.75%" in table.notes[1]
    assert [places.cells(place) for place in places.lines] == [
        ["lossy", "0.5", r"a\n", "b¦", "c", "d", "e", "text 1, token 0 + 3"]
    ]
    assert parts(CELL, [record("base", 0.0, outcome="crashed")]) == []


def test_a_server_compared_on_fewer_tokens_is_named_below_the_table():
    assert len(parts(CELL, RECORDS)[0].notes) == 3  # the last: some have no interval
    table, _ = parts(CELL, [record("base", 0.0), record("lossy", 0.1, top=20)])
    assert "arm lossy returns its 20 likeliest tokens" in table.notes[2]
    assert "Fewer than 16 windows" in table.notes[3]


def found(*arms):
    """Return findings with what one run of each arm scored; ``arms``: names and shifts."""
    names = tuple(name for name, _ in arms)
    records = tuple(record(name, shift) for name, shift in (("base", 0.0), *arms))
    return Findings(names, "base", qualities=tuple(text_qualities(["base", *names], records)[1:]))


def test_the_headline_has_each_arm_s_quality_with_its_interval():
    assert quality_sentences(found(("lossy", 0.1))) == [
        "Quality against base: lossy KL 0.098 (0.0918 to 0.105) nats, 92.23 % (90.41 to 94.06) the "
        "same next token."
    ]
    assert quality_sentences(Findings(("b",), "a")) == []


def test_of_many_arms_the_headline_has_the_closest_and_the_furthest():
    (sentence,) = quality_sentences(found(("c", 0.3), ("a", 0.1), ("d", 0.4), ("b", 0.2)))
    assert sentence.startswith(
        "Quality against base, the closest and the furthest of 4 arms: a KL 0."
    )
    assert "; d KL 0." in sentence and sentence.count(" KL ") == 2


def test_the_outputs_of_a_scoring_workload_are_not_requests():
    cell = planted_cell([{"metric": "total_tok_s"}])
    identity = IdentityReport("b0", (), (OutputAgreement("lossy", 1, 2, 0.5),))
    analysis = SimpleNamespace(identity=identity)
    for records, noun in ((RECORDS, "scored tokens"), ([], "requests")):
        table = section_table(outputs_section, cell, records, analysis=analysis)
        assert table.columns[1].heading == f"{noun} that agree in every run"


def speeds(**effects):
    """Return a cell whose arms have these effects on speed; None: an effect that is not known."""
    comparisons = [{"arm": arm, "effect_pct": effect, "ci_low_pct": None, "ci_high_pct": None}
                   for arm, effect in effects.items()]  # fmt: skip
    arms = [ARMS[0], *({"name": arm, "role": "arm"} for arm in effects)]
    return planted_cell([{"metric": "total_tok_s", "comparisons": comparisons}], arms=arms)


def test_the_chart_of_speed_comes_first_if_a_speed_is_known():
    chart, *tables = parts(speeds(lossy=12.5), RECORDS)
    assert chart.title == "speed against quality" and len(tables) == 2
    assert len(parts(speeds(lossy=None), RECORDS)) == 2  # no chart


def test_texts_of_intervals():
    assert interval_text(Interval(0.00412, 0.0032, 0.0052)) == "0.00412 (0.0032 to 0.0052)"
    assert interval_text(Interval(0.5, None, None)) == "0.5"
    assert interval_text(Interval(0, 0, 0)) == "0"
    assert share_text(Interval(0.991, 0.987, 0.995)) == "99.10 % (98.70 to 99.50)"


def test_a_mean_has_student_s_interval_of_its_block_means():
    values = RNG.normal(size=160)
    interval = block_jackknife(lambda some: float(values[some].mean()), 160)
    means = values.reshape(8, 20).mean(axis=1)
    low, high = stats.t.interval(0.95, 7, means.mean(), stats.sem(means))
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_few_windows_have_no_interval():
    assert block_jackknife(lambda some: 1.0, 15) == Interval(1.0, None, None)
    assert block_jackknife(lambda some: 1.0, 16) == Interval(1.0, 1.0, 1.0)


def test_windows_are_left_out_in_4_to_8_blocks():
    for count, blocks in ((16, 4), (99, 4), (100, 5), (160, 8), (1000, 8)):
        used = []
        block_jackknife(lambda some, used=used: used.append(len(some)) or 1.0, count)
        assert used[-1] == count and len(used) == 1 + blocks


def test_a_positive_statistic_has_a_positive_interval_unless_it_is_0():
    values = RNG.lognormal(0, 2, 40)
    assert positive_interval(lambda some: float(values[some].mean()), 40).low > 0
    values[1:] = 0
    interval = positive_interval(lambda some: float(values[some].mean()), 40)
    assert interval.low == 0 < interval.estimate < interval.high


@pytest.mark.parametrize(
    ("correlation", "count", "studies"),
    [(0.0, 50, 1000), (0.3, 50, 1000), (0.5, 50, 4000), (0.5, 100, 1000)],
)
def test_intervals_of_dependent_windows_cover_the_truth(correlation, count, studies):
    """Simulated studies of skewed windows, each correlated with the window before."""
    noise = np.random.default_rng(1).normal(size=(studies, count))
    for i in range(1, count):
        fresh = math.sqrt(1 - correlation**2) * noise[:, i]
        noise[:, i] = correlation * noise[:, i - 1] + fresh
    truth, covered = math.exp(0.125), 0
    for study in np.exp(0.5 * noise):
        interval = positive_interval(lambda some, x=study: float(x[some].mean()), count)
        covered += interval.low <= truth <= interval.high
    assert 0.93 <= covered / studies <= 0.97


@pytest.mark.parametrize(("share", "tokens"), [(0.9, 60), (0.99, 70), (0.999, 500)])
def test_intervals_of_quantiles_cover_the_truth(share, tokens):
    """Skewed positions in 32 windows of different levels."""
    rng = np.random.default_rng(tokens)
    truth = stats.norm.ppf(share, scale=math.hypot(1.0, 0.2))
    studies = rng.normal(size=(300, 32, tokens)) + 0.2 * rng.normal(size=(300, 32, 1))
    found = [quantile_interval(list(np.exp(study)), share) for study in studies]
    known = [one for one in found if one.low is not None]
    assert len(known) > 200
    covered = np.mean([one.low <= math.exp(truth) <= one.high for one in known])
    assert covered >= 0.945


def test_a_quantile_has_an_interval_only_with_positions_beyond_it():
    windows_of = [RNG.exponential(size=100) for _ in range(100)]
    assert quantile_interval(windows_of, 0.999).low is not None
    assert quantile_interval(windows_of[:99], 0.999).low is None
    assert quantile_interval(windows_of[:15], 0.5).low is None
    assert quantile_interval([np.zeros(50)] * 20, 0.9) == Interval(0, 0, 0)
    half = [np.repeat([0.0, 1.0], 50)] * 20  # half of the values are the median
    assert quantile_interval(half, 0.3) == Interval(0, 0, 0)


def test_the_config_and_the_gate_have_the_same_limits():
    assert list(IS_UPPER_LIMIT) == list(vars(QualityLimits()))


@pytest.mark.parametrize(
    ("name", "kept", "undecided", "broken"),
    [("kl_mean", 0.2, 0.1, 0.05), ("top1_agreement", 0.9, 0.94, 0.99)],
)
def test_a_limit_is_kept_broken_or_not_decided(name, kept, undecided, broken):
    _, lossy = text_qualities(["base", "lossy"], RECORDS)
    interval = lossy.metrics[name]
    assert interval.low < undecided < interval.high
    assert list(broken_limits(lossy, {name: kept})) == []
    (line,) = broken_limits(lossy, {name: undecided})
    assert line.startswith(f"{name} is not decided") and "score more windows" in line
    (line,) = broken_limits(lossy, {name: broken})
    assert line.endswith(f"must be {'at most' if name == 'kl_mean' else 'at least'} {broken:g}")


def gate(limit, records=RECORDS):
    arms = [
        Arm(name, role, {}, {}, "quality", quality={"kl_mean": limit})
        for name, role in (("base", "baseline"), ("lossy", "arm"))
    ]
    report = IdentityReport(reference=None, differences=(), agreement=())
    return validity_gates.identical(report, arms, records, 0.05)


def test_the_gate_fails_for_the_arm_outside_the_limits():
    assert gate(0.2).status == "pass"
    failed = gate(0.01)
    assert failed.status == "fail" and failed.cause("base") is None
    assert "kl_mean is 0." in failed.cause("lossy")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "pass"),
        ({"top": 20}, "fail"),  # a server
        ({"reference_rest": 0.02}, "fail"),  # an arm in a process of its own
    ],
)
def test_a_lower_bound_of_the_kl_divergence_breaks_a_limit_and_never_keeps_it(changes, status):
    other = {key: value for key, value in changes.items() if key != "top"}
    records = [record("base", 0.0, **other), record("lossy", 0.1, **changes)]
    decided = gate(0.2, records)
    assert decided.status == status
    assert decided.cause("base") is None
    if status == "fail":
        cause = decided.cause("lossy")
        assert "kl_mean is not decided: 0." in cause and "lower bound from the likeliest" in cause
        assert "must be at most 0.01" in gate(0.01, records).cause("lossy")
        (line,) = gate(0.1, records).reasons  # more windows would not help
        assert "lower bound" in line and "score more windows" not in line
    same = [record("base", 0.0, **other), record("lossy", 0.0, **changes)]
    assert gate(0.2, same).status == "pass"


def test_an_arm_that_scored_nothing_fails_the_gate():
    assert "lossy: no run has scored texts" in gate(0.2, RECORDS[:2]).reasons


@pytest.mark.parametrize("windows", [1, 15])
def test_too_few_windows_have_an_estimate_without_an_interval(windows):
    kl = np.arange(1.0, windows + 1)
    for compute in (block_jackknife, positive_interval):
        interval = compute(lambda indices: float(kl[indices].mean()), windows)
        assert interval.estimate == pytest.approx(kl.mean())
        assert interval.low is None and interval.high is None


@pytest.mark.parametrize(
    ("agreement", "decided"),
    [
        (Interval(0.999, 0.997, 1.0), False),  # its upper limit was cut off at 1
        (Interval(1.0, 1.0, 1.0), True),
        (Interval(0.9, 0.85, 0.95), True),
        (Interval(0.9, None, None), False),
    ],
)
def test_windows_are_scored_until_the_gate_decides(monkeypatch, agreement, decided):
    """The search ended, and then the gate asked for more windows."""
    quality = ArmQuality("lossy", 32, 800, {"top1_agreement": agreement})
    monkeypatch.setattr(perplexity_and_kl, "text_qualities", lambda *_: [quality])
    limits = {"top1_agreement": 1.0}
    assert perplexity_and_kl.limits_decided(["lossy"], [], limits, 0.95) is decided
    assert any("is not decided" in line for line in broken_limits(quality, limits)) is not decided


def test_shares_below_1_are_never_100_percent():
    assert share_text(Interval(0.99996, 0.9993, 1.0)) == "99.99 % (99.93 to 100.00)"
    agreement = OutputAgreement("lossy", 1, 2, 0.9996)
    report = SimpleNamespace(identity=IdentityReport("b0", (), (agreement,)))
    table = section_table(outputs_section, CELL, RECORDS, analysis=report)
    assert table.cells(agreement)[2] == "99.9%"
    nearly = replace(scored().qualities["lossy"], metrics={
        "kl_mean": Interval(0.1, None, None), "top1_agreement": Interval(0.9996, None, None)
    })  # fmt: skip
    findings = Findings(("lossy",), "base", qualities=(nearly,))
    assert next(worth_clauses(findings, "lossy")).endswith(", 99.9 % of next tokens are the same")
