"""Interleaved arms are compared round by round; arms in separate processes are not."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from labkit.analysis import analyse_cell
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.observations import (
    MetricRow,
    RunValue,
    build_rows,
    log_values,
    run_value,
)
from labkit.analysis.exports.tool_exports import FormatError, benchstat
from labkit.analysis.statistics.permutation_test import permutation_test
from labkit.records import RecordError

STUDIES = 2_000


def interleaved_row(values, places=None):
    """Return a row of interleaved arms from log values, float64 [processes, arms, rounds].

    The baseline is the first arm. ``places`` are positions, int of the same shape, if recorded.
    """
    known = np.zeros((*values.shape[:2], 0), int) if places is None else places
    times = np.exp(values)
    middles = np.median(times, axis=-1)
    arms = {
        name: [
            RunValue(p, 0, f"runs/{p}-{name}", middles[p, a], tuple(x), tuple(known[p, a]))
            for p, x in enumerate(times[:, a])
        ]
        for a, name in enumerate(("base", "arm", "control")[: values.shape[1]])
    }
    return MetricRow("case", "us", "us", "lower", True, paired_baseline="base", arms=arms)


def test_an_arm_is_the_baseline_plus_the_middle_of_its_rounds():
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1, (6, 3, 5))
    row, blocks = interleaved_row(values), (0, 2, 5)
    base = log_values(row, "base", blocks)
    assert base[:, 0] == pytest.approx(np.median(values[[0, 2, 5], 0], axis=1))
    for a, name in ((1, "arm"), (2, "control")):
        ratios = np.median(values[[0, 2, 5], a] - values[[0, 2, 5], 0], axis=1)
        assert (log_values(row, name, blocks) - base)[:, 0] == pytest.approx(ratios)


@pytest.mark.parametrize(
    ("over_rounds", "ratios", "value"),
    [
        (None, (9.0, 0.1, 0.2, 0.4), 0.3),
        ("median", (9.0, 0.1, 0.2), 0.2),
        ("middle_half", (9.0, 0.1, 0.2, 0.4, -7.0, 0.3, 0.2, 5.0), 0.275),
        ("middle_half", (9.0, 0.1, 0.3, 0.5, -7.0, 0.6), (0.5 * 0.1 + 0.3 + 0.5 + 0.5 * 0.6) / 3),
        ("middle_half", (9.0, 0.1, 0.2), (0.25 * 0.1 + 0.2 + 0.25 * 9.0) / 1.5),
    ],
)
def test_the_record_names_the_estimator_over_rounds(make_cell, over_rounds, ratios, value):
    """Records without a name go on giving the median's digits."""

    def change(record):
        factors = np.exp(ratios) if record.arm == "seq_map" else np.ones(len(ratios))
        named = {} if over_rounds is None else {"over_rounds": over_rounds}
        cases = [
            replace(c, notes={**c.notes, **named}, metrics=tuple(
                replace(m, repeats=tuple(100.0 * factors)) for m in c.metrics))
            for c in record.cases
        ]  # fmt: skip
        return replace(record, cases=tuple(cases))

    path = make_cell(blocks=1, runs=1, isolation="in_process", change=change)
    row = analyse(path).rows[0]
    found = log_values(row, "seq_map", [0]) - log_values(row, "binary_search", [0])
    assert found.item() == pytest.approx(value)


def test_an_unknown_estimator_over_rounds_is_refused(make_cell):
    def change(record):
        cases = (replace(c, notes={**c.notes, "over_rounds": "mode"}) for c in record.cases)
        return replace(record, cases=tuple(cases))

    with pytest.raises(RecordError, match="unknown over_rounds: 'mode'"):
        analyse(make_cell(blocks=1, isolation="in_process", change=change))


@pytest.mark.parametrize(
    ("repeats", "value"),
    [
        ((9.0, 1.0, 2.0), 2.0),
        ((100.0, 0.5, 4.0, 1.0), 2.0),  # the geometric mean of the middle two
        ((9.0, 0.0, 3.0, -1.0), 1.5),  # which have no logarithm
    ],
)
def test_a_run_s_value_is_the_median_of_its_repeats(repeats, value):
    assert run_value(repeats) == value


def test_an_effect_of_position_common_to_all_arms_is_removed():
    rng = np.random.default_rng(3)
    places = rng.permuted(np.broadcast_to(np.arange(3), (8, 40, 3)), axis=2).transpose(0, 2, 1)
    values = rng.normal(0, 0.01, (8, 1, 40)) + rng.normal(0, 0.005, (8, 3, 40))
    values[:, 1] += 0.02
    added = np.array([0.2, 0.0, -0.05])

    def estimates(values, places):
        row = interleaved_row(values, places)
        one, other = (log_values(row, arm, range(8)) for arm in ("base", "arm"))
        return (other - one)[:, 0]

    with_places = values + added[places]
    plain = estimates(values, None)
    assert np.std(estimates(with_places, None)) > 4 * np.std(plain)
    assert np.std(estimates(with_places, places)) < 1.5 * np.std(plain)
    assert np.mean(estimates(with_places, places)) == pytest.approx(0.02, abs=0.002)
    # Under swapped labels the estimate is the same with the other sign.
    swapped, theirs = with_places[:, [1, 0, 2]], places[:, [1, 0, 2]]
    assert estimates(swapped, theirs) == pytest.approx(-estimates(with_places, places))


@pytest.mark.parametrize(
    ("outcome", "counts"), [("ok", True), ("vacuous", True), ("crashed", False), ("oom", False)]
)
def test_a_run_that_failed_has_no_value(make_cell, outcome, counts):
    """Its record may hold the cases that it measured before."""
    first, *others = analyse(make_cell(blocks=1)).data.records
    rows = build_rows([replace(first, outcome=outcome, detail="a reason"), *others])
    files = [value.file for value in rows[0].arms[first.arm]]
    assert len(files) == 1 + counts and (f"runs/{first.run}.json" in files) is counts


def test_positions_that_do_not_cover_all_rounds_are_ignored():
    values = np.random.default_rng(4).normal(0, 1, (3, 2, 6))
    row = interleaved_row(values, np.zeros((3, 2, 5), int))
    assert (log_values(row, "arm", [0]) == log_values(interleaved_row(values), "arm", [0])).all()


def in_process(path, isolation="in_process"):
    file = path / "cell.json"
    facts = json.loads(file.read_text())
    facts["design"]["isolation"] = isolation
    file.write_text(json.dumps(facts))
    return path


def changing_rounds(change):
    """Return a change of records whose repeats are ``change(record, repeats)``."""

    def apply(record):
        cases = tuple(
            replace(c, metrics=tuple(replace(m, repeats=change(record, m.repeats))
                                     for m in c.metrics))
            for c in record.cases
        )  # fmt: skip
        return replace(record, cases=cases)

    return apply


def test_medians_of_arms_do_not_depend_on_the_isolation(make_cell):
    path = make_cell(blocks=8, runs=1, repeats=9, noise=0.01)
    apart = analyse_cell(path)["rows"][0]
    together = analyse_cell(in_process(path))["rows"][0]
    assert apart["arms"] == together["arms"]
    assert (
        apart["comparisons"] == analyse_cell(in_process(path, "process"))["rows"][0]["comparisons"]
    )


def test_the_median_is_over_the_rounds_ratios_not_of_each_arm(make_cell):
    """The arm is 3 % slower apart from one stall, which its median would show in full."""

    def change(record, repeats):
        stalled = 5.0 / 1.03 if record.arm == "seq_map" else 2.0
        return tuple(x * y for x, y in zip(repeats, (1.0, stalled, 10.0), strict=True))

    options = {"blocks": 8, "runs": 1, "noise": 0.0, "effects": {"seq_map": 1.03}}
    path = make_cell(change=changing_rounds(change), **options)
    assert analyse_cell(path)["rows"][0]["comparisons"][0]["effect_pct"] == pytest.approx(150)
    comparison = analyse_cell(in_process(path))["rows"][0]["comparisons"][0]
    assert comparison["effect_pct"] == pytest.approx(3.0)


def test_an_arm_without_the_baseline_s_rounds_is_not_compared(make_cell):
    """It made its whole study unreadable."""

    def short(record, repeats):
        return repeats[:-1] if record.arm == "seq_map" and record.block == 3 else repeats

    path = make_cell(change=changing_rounds(short), blocks=6, runs=1)
    apart = analyse(path)  # in processes of their own they may have as many as they like
    assert apart.cell.rows[0].comparison("seq_map").verdict != "invalid"
    row = analyse(in_process(path)).cell.rows[0]
    reason = (
        r"seq_map has 2 repeats of dispatch_us in runs/b03-p0\d-seq_map\.json, but bin.* has 3 in"
    )
    assert row.comparison("seq_map").verdict == "invalid"
    assert re.match(reason, row.comparison("seq_map").reason)
    assert row.comparison("control").effect_pct is not None


def test_a_round_without_a_logarithm_is_inconclusive(make_cell):
    def zero(record, repeats):
        return (0.0, *repeats[1:]) if record.block == 1 else repeats

    path = make_cell(change=changing_rounds(zero), blocks=6, runs=1)
    assert analyse_cell(path)["rows"][0]["comparisons"][0]["effect_pct"] is not None
    comparison = analyse_cell(in_process(path))["rows"][0]["comparisons"][0]
    assert (comparison["verdict"], comparison["effect_pct"]) == ("inconclusive", None)


def stormy_processes(rng, kind, processes=8, rounds=12):
    """Simulate log times of two equal arms, float64 [processes, 2, rounds], and their positions.

    Noise is per process, per moment and per position. Each round has a new random order; the
    positions are int of the same shape.
    """
    size = (processes, rounds, 2)  # the last: first or second turn of the round
    first = rng.integers(2, size=(processes, rounds))  # the arm whose turn is first
    values = rng.normal(0, 0.05, (processes, 1, 1)) + rng.normal(0, 0.02, (processes, rounds, 1))
    values = values + rng.normal(0, 0.005, size)
    if kind == "drift":
        moment = np.arange(np.prod(size)).reshape(size)
        values += 0.3 * moment / moment.size + 0.05 * (moment % (2 * rounds)) / (2 * rounds)
    if kind == "modes":
        values += 0.1 * (rng.random((processes, 1, 1)) < 0.25)
    if kind == "tails":
        values += (rng.random(size) < 0.05) * rng.exponential(0.5, size)
    if kind == "cold caches":  # the first turn finds those of the round before
        values[..., 0] += 0.2
    if kind == "carry-over":  # the second turn finds the caches of the other arm
        values[..., 1] += 0.03
        repeats_itself = first[:, 1:] == np.where(first[:, :-1] == 0, 1, 0)  # follows itself: warm
        values[:, 1:, 0] -= 0.03 * repeats_itself
    by_arm = np.where(first[..., None] == 0, values, values[..., ::-1]).transpose(0, 2, 1)
    if kind == "arm by process":  # where an arm's code and memory lie
        by_arm = by_arm + rng.normal(0, 0.01, (processes, 2, 1))
    if kind == "load order":  # what was loaded first has the better memory
        by_arm = by_arm + 0.02 * np.stack([late := rng.integers(2, size=processes), 1 - late])[
            ..., None
        ].transpose(1, 0, 2)
    return by_arm, np.stack([first, 1 - first], axis=1)


KINDS = (
    "plain", "drift", "modes", "tails", "carry-over", "arm by process", "load order",
    "cold caches",
)  # fmt: skip
QUICK = ("plain", "carry-over")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in KINDS]
)
@pytest.mark.parametrize("recorded", [False, True], ids=["no places", "places"])
def test_interleaved_arms_without_an_effect_seldom_differ(kind, recorded):
    rng = np.random.default_rng([1, KINDS.index(kind)])
    blocks, rejected = range(8), 0
    for _ in range(STUDIES):
        values, places = stormy_processes(rng, kind)
        row = interleaved_row(values, places if recorded else None)
        rejected += (
            permutation_test(*(log_values(row, arm, blocks) for arm in ("base", "arm"))) <= 0.05
        )
    assert rejected / STUDIES <= 0.06


def test_rounds_are_not_independent_samples():
    """If rounds were independent samples, an offset of an arm per process would be an effect."""
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(200):
        values, _ = stormy_processes(rng, "arm by process")
        rounds = np.diff(values, axis=1).ravel()
        wrong += abs(rounds.mean()) > 1.96 * rounds.std() / np.sqrt(len(rounds))
    assert wrong / 200 > 0.2


@pytest.mark.parametrize("other", [{"unit": "ms"}, {"better": "higher"}])
def test_arms_that_report_a_metric_in_other_units_are_not_compared(make_cell, other):
    """Arms of own kinds may; the other arms, and the other cases, keep their comparisons."""

    def change(record):
        if record.arm != "seq_map":
            return record
        one, two = record.cases
        own = tuple(replace(metric, **other) for metric in one.metrics)
        return replace(record, cases=(replace(one, metrics=own), two))

    unit, better = {"unit": "us", "better": "lower", **other}.values()
    analysis = analyse(make_cell(cases=("one", "two"), change=change))
    row = analysis.cell.rows[0]
    assert (row.unit, row.better, row.arms["seq_map"].n) == ("us", "lower", 0)
    assert (row.comparison("seq_map").verdict, row.comparison("seq_map").reason) == (
        "invalid",
        f"seq_map reports dispatch_us in {unit} ({better} is better), other runs in us (lower is "
        "better)",
    )
    assert row.comparison("control").effect_pct is not None
    assert row.comparison("control").verdict != "invalid"
    assert analysis.cell.rows[1].comparison("seq_map").verdict == "better"
    with pytest.raises(FormatError, match=f"seq_map reports dispatch_us in {unit}"):
        benchstat([analysis])
    first, *_ = build_rows(sorted(analysis.data.records, key=lambda r: r.arm != "seq_map"))
    assert (first.unit, first.better) == ("us", "lower")


def test_an_export_without_units_refuses_cells_in_different_ones(make_cell):
    def change(record):
        (case,) = record.cases
        own = tuple(replace(metric, unit="ms") for metric in case.metrics)
        return replace(record, cases=(replace(case, metrics=own),))

    cells = [analyse(make_cell("s/a", cases=("one",)))]
    assert benchstat(cells * 2)
    cells.append(analyse(make_cell("s/b", cases=("one",), change=change)))
    line = r"names no units, and binary_search reports dispatch_us in ms \(lower is better\), other"
    with pytest.raises(FormatError, match=line):
        benchstat(cells)
