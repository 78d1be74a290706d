"""The division of the time: causes, their error rates, the counters' words, what it is worth."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import planted_cell

from labkit.analysis.comparison.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.comparison.step_parts import (
    divide_time,
    part_times,
    whole_us,
)
from labkit.analysis.document.chart import Bars
from labkit.analysis.tables.step_time_breakdown import NOT_DIVIDED, time_section
from labkit.records import Arm, Record

ARMS = [Arm("base", "baseline", {}, {}), Arm("new", "arm", {}, {})]
# us of a decode step and of a step with prompt tokens, by part.
STEP = {
    "schedule": (60, 80), "build": (50, 90), "plan": (90, 90), "attention": (700, 2500),
    "products": (900, 4000), "rest": (200, 600), "sample": (150, 150), "update": (60, 60),
    "idle": (5, 5), "left_over": (120, 130),
}  # fmt: skip
COUNTERS = {
    "steps.decode": 80.0, "steps.mixed": 20.0, "steps.total": 100.0, "tokens.output": 400.0,
    "tokens.computed": 1400.0,
}  # fmt: skip


def record(arm, block, *, rng=None, machine=1.0, factors=(), counters=(), share=1.0):
    """A run whose parts have noise, and in turns with clocks a share of its decode steps."""
    steps = {"decode": int(80 * share), "prefill": 20}
    parts = {kind: {} for kind in steps}
    for part, values in STEP.items():
        noise = machine * (rng.lognormal(0, 0.03) if rng else 1.0) * dict(factors).get(part, 1.0)
        for (kind, number), us in zip(steps.items(), values, strict=True):
            parts[kind][part] = us * number * noise
    tokens = 400 * (steps["decode"] + 20) // 100
    note = {"steps": steps, "parts_us": parts, "clocks_us": 10.0, "output_tokens": tokens}
    role = "baseline" if arm == "base" else "arm"
    return Record(
        arm, role, block, 0 if arm == "base" else 1, 0, "ok", "2026-11-20T20:00:00Z",
        counters={**COUNTERS, **dict(counters)}, notes={"step_parts": note},
    )  # fmt: skip


def study(seed=0, factors=(), counters=(), blocks=8, alpha=0.05, claimed=("new",), base=((),)):
    """A study's division of the time; ``claimed=None``: if its measured times claim an effect.

    ``base``: counters of the baseline, those of one block after another.
    """
    rng = np.random.default_rng(seed) if seed is not None else None
    machines = rng.lognormal(0, 0.05, blocks) if rng else [1.0] * blocks
    records = [
        record(arm, block, rng=rng, machine=machine, factors=f, counters=c)
        for block, machine in enumerate(machines)
        for arm, f, c in (("base", (), base[block % len(base)]), ("new", factors, counters))
    ]
    criteria = DecisionCriteria(1, alpha, 2.0)
    if claimed is None:
        row = MetricRow("all", "tpot_ms", "ms", "lower", primary=True)
        for one in records:  # the measured turns have noise of their own
            own = dict(factors) if one.arm == "new" else {}
            turn = record(one.arm, one.block, rng=rng, machine=machines[one.block], factors=own)
            us = whole_us(part_times(turn))
            row.arms.setdefault(one.arm, []).append(RunValue(one.block, one.position, "", us))
        (measured,) = compare_arm([row], "new", "base", criteria)
        claimed = {"new"} if measured.p_adjusted <= alpha else ()
    return divide_time(ARMS, records, criteria, claimed)


WHOLE = sum(decode * 0.8 + prefill * 0.2 for decode, prefill in STEP.values())


def longer(part):
    """Factors that make a part take 5 % of a step longer."""
    decode, prefill = STEP[part]
    return {part: 1 + 0.05 * WHOLE / (0.8 * decode + 0.2 * prefill)}


PLANTED = ("schedule", "attention", "sample", "idle")


@pytest.mark.parametrize("part", PLANTED)
def test_a_planted_part_is_named_in_18_of_20_studies(part, studies=20):
    causes = [study(seed, longer(part), claimed=None).arms[0].cause for seed in range(studies)]
    assert causes.count(part) >= 0.9 * studies and set(causes) <= {part, None}
    print(part, causes.count(part), "of", studies)


def test_a_copy_has_no_cause_in_20_studies(studies=20, named=0):
    causes = [study(1000 + s, claimed=None).arms[0].cause for s in range(studies)]
    print("copies with a cause:", studies - causes.count(None), "of", studies)
    assert studies - causes.count(None) <= named


@pytest.mark.slow
def test_error_rates_of_causes():
    test_a_copy_has_no_cause_in_20_studies(1000, named=2)
    for part in PLANTED:
        test_a_planted_part_is_named_in_18_of_20_studies(part, 100)


def section(division, rows=()):
    """Return the section's sentences and its chart."""
    arms = [{"name": "base", "role": "baseline"}, {"name": "new", "role": "arm"}]
    cell = replace(planted_cell(rows, arms=arms), time=division)
    parts = {part.kind: part for part in time_section.parts(SimpleNamespace(cell=cell))}
    return parts["bullets"].lines, parts["chart"].chart


def said(division, rows=()):
    return section(division, rows)[0]


def test_differences_are_percent_of_a_step_and_what_is_left_over_is_shown():
    division = study(None, {"sample": 2.0, "attention": 0.8}, blocks=8)
    (arm,) = division.arms
    parts = {one.part: one for one in arm.parts}
    assert division.total_us == pytest.approx(WHOLE / 4)
    assert parts["sample"].difference_us == pytest.approx(150 / 4)
    assert parts["attention"].pct == pytest.approx(-100 * (0.8 * 140 + 0.2 * 500) / WHOLE)
    assert arm.cause == "attention" and arm.total.pct == pytest.approx(
        sum(one.pct for one in arm.parts)
    )
    _, chart = section(division)
    assert chart.rows == ("base", "attention", "sampling", NOT_DIVIDED, "new")
    boxes = [box for mark in chart.marks if isinstance(mark, Bars) for box in mark.boxes]
    widths = [right - left for left, right, *_ in boxes]
    pcts = [abs(parts[part].difference_us) for part in ("attention", "sample")]
    assert widths[1:-1] == pytest.approx([*pcts, 0.0], abs=1e-6)
    assert "first cause: attention" in said(division)[0]
    assert division.groups[0].pct == pytest.approx(parts["attention"].us / 0.8 / WHOLE * 400)


def test_steps_are_weighted_as_in_the_measurement():
    whole, quarter = record("base", 0), record("base", 0, share=0.25)
    assert part_times(quarter) == pytest.approx(part_times(whole))
    assert part_times(whole)["products"] == pytest.approx((0.8 * 900 + 0.2 * 4000) / 4)
    alone = record("base", 0, counters={"steps.mixed": 0.0, "tokens.output": 0.0})
    assert part_times(alone) == pytest.approx(part_times(whole))


@pytest.mark.parametrize(("alpha", "blocks"), [(0.05, 3), (0.0, 10)])
def test_too_few_blocks_and_interim_results_name_no_cause(alpha, blocks):
    division = study(0, longer("sample"), blocks=blocks, alpha=alpha)
    assert division.arms[0].cause is None and "too few blocks" in said(division)[0]


def test_a_cause_explains_a_claimed_difference_in_its_direction():
    undecided = study(0, longer("sample"), claimed=())
    assert undecided.arms[0].cause is None
    assert "no metric's difference is decided" in said(undecided)[0]
    # Attention takes less time, by more than any other part takes longer.
    (arm,) = study(None, {"attention": 0.6, "products": 1.2, "rest": 1.8}).arms
    assert arm.total.pct > 0 and arm.cause == "products"


def test_runs_without_clocks_have_no_division():
    plain = Record("base", "baseline", 0, 0, 0, "ok", "2026-11-20T20:00:00Z")
    assert divide_time(ARMS, [plain], DecisionCriteria(1, 0.05, 2.0), ()) is None


@pytest.mark.parametrize(
    ("counters", "cause", "text"),
    [
        ({"tokens.padded": 600.0}, "padding", "1.5, not 0"),
        (
            {"tokens.recomputed": 400.0, "tokens.computed": 1800.0},
            "recomputation",
            "29 % more rows",
        ),
        ({}, "products", None),
    ],
)
def test_more_rows_are_the_cause_of_a_longer_model(counters, cause, text):
    (arm,) = study(0, {"products": 1.3, "rest": 1.2}, counters).arms
    assert arm.cause == cause and (text is None or any(text in one for one in arm.counts))


def test_fewer_steps_are_said_with_their_reason():
    drafts = {"spec.accepted": 160.0, "steps.total": 88.0}
    sooner = dict.fromkeys(STEP, 0.88 * 1.06)

    def counts(counters, *base, factors=()):
        return study(None, factors, counters, blocks=3, base=base).arms[0].counts

    assert counts(drafts, {"spec.accepted": 0.0}, factors=sooner)[0] == (
        "12 % fewer steps, because drafts were accepted 1.82 times per step (baseline 0); "
        "each step takes 6 % longer"
    )
    # Preemptions add steps, so they are no reason for fewer.
    optimistic = {"preemptions": 4.0, "steps.total": 88.0, "tokens.computed": 1410.0}
    fewer = counts(optimistic, {"preemptions": 0.0})[0]
    assert fewer.startswith("12 % fewer steps, because a step has 16 tokens (baseline 14); each")
    assert counts({"preemptions": 3.0}, {"preemptions": 1.0}, {"preemptions": 4.0}) == ()


@pytest.mark.parametrize(("name", "rejected"), [("tokens.output", 0.0), ("tokens.sampled", 560.0)])
def test_rejected_drafts_are_no_output_tokens(name, rejected, monkeypatch):
    """Older records count the rows of rejected drafts, too."""
    monkeypatch.delitem(COUNTERS, "tokens.output")
    drafts = {"spec.drafted": 600.0, "spec.accepted": 40.0, "steps.total": 90.0}
    slower = dict.fromkeys(STEP, 1.5)
    arm = study(
        None, slower, {**drafts, name: 400.0 + rejected}, blocks=3, base=({name: 400.0},)
    ).arms[0]
    assert arm.counts[0].startswith("10 % fewer steps, because drafts were accepted 0.444 times")
    assert arm.total.pct == pytest.approx(50, rel=0.01)


def test_the_predicted_effect_stands_beside_the_measured_one():
    division = study(None, {"products": 1.1})
    comparison = {"arm": "new", "effect_pct": -5.0, "ci_low_pct": -6.0, "ci_high_pct": -4.0,
                  "verdict": "worse"}  # fmt: skip
    row = {"metric": "total_tok_s", "unit": "tok/s", "better": "higher", "primary": True,
           "comparisons": [comparison]}  # fmt: skip
    sentences = said(division, [row])
    (text,) = (one for one in sentences if one.startswith("new: its parts predict −4."))
    assert "measured −5.0 % (−6.0 to −4.0)" in text
    assert sum("goes to" in one for one in sentences) == 1
