"""Rules for comparing two studies, each tested on both sides of its limit.

The studies exist in memory: 3 blocks of 2 runs have 216 relabellings each and 46,656 joint ones,
so every p is exact.
"""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_cells import compare_studies
from rich.console import Console

from labkit.analysis.comparison.cell_analysis import CellAnalysis, CellData
from labkit.analysis.comparison.machine_or_arm_stalls import StallAttribution
from labkit.analysis.comparison.observations import build_rows, complete_blocks, log_values
from labkit.analysis.comparison.output_identity import IdentityReport
from labkit.analysis.comparison.validity_gates import Gate
from labkit.analysis.comparison.verdict import NOISE_EXCEEDS_MARGIN, Verdict
from labkit.analysis.pages.terminal_report import print_changes
from labkit.analysis.statistics.difference_in_differences import effect_change, estimate_effect
from labkit.analysis.statistics.hodges_lehmann import breakpoints, to_percent
from labkit.analysis.studies.between_study_comparison import StudiesNotComparable, probe_shift_pct
from labkit.records import Arm, CaseRecord, Metric, Record

ROLES = {"base": "baseline", "arm": "arm", "control": "control"}
MACHINE = {"cpu_model": "test", "cores": 2, "memory_bytes": 8 << 30, "os": "Linux"}
FLOOR = 2 / 216**2


def study(
    shifts=None,
    *,
    seed=1,
    runs=2,
    blocks=3,
    noise=0.001,
    control_noise=None,
    probe=0.0,
    probe_noise=0.0,
    speed=0.0,
    better="lower",
    primary=True,
    change=None,
    name="cell",
    config=None,
    inputs=None,
    **design,
):
    """Analyse a study in memory.

    ``shifts`` are the arm's effects by case; they, ``speed`` and ``probe`` are on the log scale.
    ``control_noise`` is the control's own noise by case.
    """
    rng = np.random.default_rng(seed)
    shifts, control_noise = shifts or {"a": 0.0}, control_noise or {}
    records = []
    for block in range(blocks):
        for position in range(runs * len(ROLES)):
            arm = list(ROLES)[position % len(ROLES)]
            here = probe + rng.normal(0, probe_noise)
            cases = []
            for case, shift in shifts.items():
                log = speed + here - probe + shift * (arm == "arm") + rng.normal(0, noise)
                log += rng.normal(0, control_noise.get(case, 0.0)) * (arm == "control")
                metric = Metric("dispatch_us", "us", better, primary, (float(np.exp(log)),))
                cases.append(CaseRecord(case, metrics=(metric,)))
            record = Record(
                arm, ROLES[arm], block, position, 0, "ok", "", environment=MACHINE,
                probe={"before": {"matmul_us": float(np.exp(here))}}, cases=tuple(cases),
            )  # fmt: skip
            records.append(change(record) if change else record)
    design = {"alpha": 0.05, "margin_pct": 2.0, "isolation": "process", **design}
    manifest = {"cell": name, "design": {"blocks": blocks, "runs_per_block": runs, **design}}
    arms = tuple(
        Arm(arm, role, {}, config or {}, inputs=inputs or {}) for arm, role in ROLES.items()
    )
    gates = {gate: Gate("pass") for gate in ("healthy", "engaged", "identical")}
    kept = tuple(record for record in records if record is not None)
    data = CellData(Path(name), manifest, arms, kept)
    return CellAnalysis(data, tuple(build_rows(kept)), gates, IdentityReport(None, (), ()))


def compare(old, new, margin_pct=2.0):
    return compare_studies([old], [new], margin_pct)


def change_of(comparison, case="a", arm="arm"):
    (change,) = (c for c in comparison.changes if (c.row.case, c.arm) == (case, arm))
    return change


def judged(change):
    return Verdict(change.comparison.verdict, change.comparison.reason)


def compared(old, new, case="a", margin_pct=2.0):
    return change_of(compare(old, new, margin_pct), case).comparison


def effect_change_of(old, new, case="a", probes_used=(False, False)):
    """Return the change of the arm's effect in one row, from the values alone."""
    effects = []
    for analysis, probe_used in zip((old, new), probes_used, strict=True):
        row = next(row for row in analysis.rows if row.case == case)
        runs = analysis.data.criteria.runs
        blocks = complete_blocks(row, ("base", "arm"), runs)
        values = [log_values(row, arm, blocks) for arm in ("base", "arm")]
        probes = tuple(
            np.array([np.log(r.probe["before"]["matmul_us"]) for r in analysis.data.records
                      if r.arm == arm and r.block in blocks]).reshape(len(blocks), runs)
            for arm in ("base", "arm")
        ) if probe_used else None  # fmt: skip
        effects.append(estimate_effect(*values, probes))
    return effect_change(*effects)


def interval_pct(change, alpha):
    limits = breakpoints(change.null_distribution, change.label_correlation).interval(alpha)
    return tuple(map(to_percent, limits))


def ordered(place, one, other):
    """Return two studies as old and new: ``one`` is the old study if ``place`` is 0."""
    return (one, other) if place == 0 else (other, one)


# --- gates and completeness


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("gate", ["healthy", "engaged", "identical"])
def test_a_failed_gate_of_either_study_makes_its_arm_invalid(place, gate):
    failed = study(seed=2)
    failed.gates[gate].fail("a reason", "arm", "a cause")
    comparison = compare(*ordered(place, failed, study()))
    side = ("old", "new")[place]
    assert judged(change_of(comparison)) == Verdict("invalid", f"{side}: a cause")
    assert not comparison.decidable  # --fail-on would always pass
    assert change_of(comparison, arm="base").comparison.verdict == "not_comparable"


@pytest.mark.parametrize("place", [0, 1])
def test_a_gate_that_fails_for_the_whole_cell_makes_its_baseline_invalid(place):
    failed = study(seed=2)
    failed.gates["healthy"].fail("a reason", None, "a cause")
    comparison = compare(*ordered(place, failed, study()))
    assert {c.comparison.verdict for c in comparison.changes} == {"invalid"}


def test_all_causes_of_both_studies_are_named():
    old, new = study(), study(seed=2)
    old.gates["healthy"].fail("", None, "swap grew")
    new.gates["engaged"].fail("", "arm", "vacuous")
    new.gates["healthy"].fail("", None, "no runs")
    reason = change_of(compare(old, new)).comparison.reason
    assert sorted(reason.split("; ")) == ["new: no runs", "new: vacuous", "old: swap grew"]


UNFINISHED = {"change": lambda record: record if record.block < 3 else None, "blocks": 4}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (UNFINISHED, "3 of 4 blocks are done, and no look was declared before the end"),
        ({"shown": [2]}, "exploratory: blocks were added after results were shown (2 -> 3)"),
        ({"declared": False}, "cell.json was lost, and with it the declared design"),
    ],
)
def test_an_incomplete_or_exploratory_study_claims_no_change(place, options, reason):
    old, new = ordered(place, study(**options), study({"a": 0.2}, seed=2))
    side = ("old", "new")[place]
    assert judged(change_of(compare(old, new))) == Verdict("estimate_only", f"{side}: {reason}")


def test_both_studies_reasons_to_withhold_claims_are_named():
    comparison = compare(study(shown=[1]), study({"a": 0.2}, shown=[2]))
    assert change_of(comparison).comparison.reason == "; ".join(
        f"{side}: exploratory: blocks were added after results were shown ({n} -> 3)"
        for side, n in (("old", 1), ("new", 2))
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_claim_needs_the_blocks_of_the_study_with_fewer_runs(place):
    """6 blocks of 1 run, or 3 of 2: 5 of 1 and 6 of 2 are too few, whichever came first."""
    one = study({"a": 0.2}, runs=1, blocks=5)
    verdict = judged(change_of(compare(*ordered(place, one, study(blocks=6, seed=2)))))
    assert verdict == Verdict("estimate_only", "5 blocks of 1: a claim needs at least 6")
    enough = study({"a": 0.2}, runs=1, blocks=6)
    comparison = compare(*ordered(place, enough, study(blocks=6, seed=2)))
    assert change_of(comparison).comparison.verdict == ("better", "worse")[place]


@pytest.mark.parametrize("place", [0, 1])
def test_the_number_of_blocks_is_that_of_the_shorter_study(place):
    old, new = ordered(place, study(blocks=2), study({"a": 0.2}, blocks=4, seed=2))
    assert compared(old, new).blocks == 2
    assert change_of(compare(old, new)).comparison.verdict == "estimate_only"


# --- levels


@pytest.mark.parametrize("place", [0, 1])
def test_the_smaller_alpha_of_two_studies_is_that_of_every_interval(place):
    old, new = ordered(place, study(alpha=0.01), study(alpha=0.05, seed=2))
    comparison, change = compared(old, new), effect_change_of(old, new)
    assert comparison.level == 0.99
    assert comparison.ci_pct == comparison.ci_raw_pct == interval_pct(change, 0.01)
    assert interval_pct(change, 0.01) != interval_pct(change, 0.05)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("stopped", "alpha"), [([], 0.04), (["a"], 0.01)])
def test_a_study_that_a_look_decided_spends_the_alpha_of_that_look(place, stopped, alpha):
    looks = [{"blocks": 2, "alpha": 0.01}, {"blocks": 3, "alpha": 0.04}]
    taken = [{**looks[0], "stopped": stopped}]
    old, new = ordered(place, study(looks=looks, looks_taken=taken), study(seed=2))
    comparison, change = compared(old, new), effect_change_of(old, new)
    assert comparison.level == 1 - alpha
    assert comparison.ci_pct == interval_pct(change, alpha)


def test_intervals_are_at_the_levels_of_holms_steps():
    """One of three rows is rejected at alpha / 3; the others are tested at alpha / 2."""
    shifts = {"b": 0.0, "a": 0.5, "c": 0.0}
    old, new = study(dict.fromkeys(shifts, 0.0)), study(shifts, seed=2)
    comparison = compare(old, new)
    for case, level in {"a": 0.05 / 3, "b": 0.05 / 2, "c": 0.05 / 2}.items():
        change, result = effect_change_of(old, new, case), change_of(comparison, case).comparison
        assert result.ci_pct == interval_pct(change, level)
        assert result.ci_raw_pct == interval_pct(change, 0.05)
        assert result.p == change.p and (result.p_adjusted <= 0.05) == (case == "a")
        # Equivalence and power use the level of the first step.
        assert result.equivalence.bound_pct == max(map(abs, interval_pct(change, 0.05 / 3)))
        assert result.mde_pct == change.mde_pct(0.05 / 3) != change.mde_pct(0.05)
        assert result.p_floor == pytest.approx(3 * FLOOR)


def test_an_adjusted_p_of_just_alpha_rejects():
    """The other row's interval is then at the level of the next step."""
    alpha = 2 * FLOOR
    old, new = study({"a": 0.0, "b": 0.0}, alpha=alpha), study({"a": 0.5, "b": 0.0}, seed=2)
    comparison = compare(old, new)
    assert change_of(comparison).comparison.p_adjusted == alpha
    assert change_of(comparison).comparison.verdict == "worse"
    change = effect_change_of(old, new, "b")
    assert change_of(comparison, "b").comparison.ci_pct == interval_pct(change, alpha)
    assert interval_pct(change, alpha) != interval_pct(change, alpha / 2)


# --- a changed machine


def test_the_machine_changed_by_the_ratio_of_the_probes_medians():
    def with_probes(*times):
        rest = iter(times)
        return study(change=lambda r: replace(r, probe={"before": {"matmul_us": next(rest)}}))

    old, new = with_probes(*[100.0] * 17, 900.0), with_probes(*[110.0] * 16, 0.1, 0.1)
    assert probe_shift_pct(old, new) == pytest.approx(10.0)
    assert probe_shift_pct(new, old) == pytest.approx(100 * (1 / 1.1 - 1))


@pytest.mark.parametrize("place", [0, 1])
def test_a_study_without_a_probe_has_a_caveat_and_no_known_change_of_the_machine(place):
    without = study(change=lambda record: replace(record, probe={}))
    old, new = ordered(place, without, study(seed=2))
    assert probe_shift_pct(old, new) is None
    comparison = compare(old, new)
    assert comparison.caveats == (
        "cell: the probe is missing, so a change of the machine would go undetected",
    )
    assert change_of(comparison).comparison.verdict == "equivalent"


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("probe_pct", "word"), [(1.9, "equivalent"), (2.1, "inconclusive")])
def test_a_machine_that_changed_by_more_than_the_margin_leaves_nothing_equivalent(
    sign, probe_pct, word
):
    new = study(seed=2, probe=np.log1p(sign * probe_pct / 100))
    comparison = compare(study(), new)
    assert change_of(comparison).comparison.verdict == word
    reason = change_of(comparison).comparison.reason
    if word == "inconclusive":
        takes = f"changed by {'+' if sign > 0 else '−'}2.1 % (margin ±2 %)"
        assert takes in reason and takes in comparison.caveats[0]


@pytest.mark.parametrize("probe_pct", [15, -15])
@pytest.mark.parametrize("change_pct", [15, -15])
def test_an_interval_that_reaches_into_the_machine_s_change_decides_nothing(probe_pct, change_pct):
    """The limit nearer to 0 must exceed the change of the machine, in either direction."""
    old, probe = study(noise=0.01), np.log1p(probe_pct / 100)
    for factor, words in ((1, ["inconclusive"] * 2), (2, ["worse", "better"])):
        shift = np.log1p(factor * change_pct / 100)
        new = study({"a": shift}, seed=2, noise=0.01, probe=probe)
        near, far = sorted(abs(limit) for limit in compared(old, new).ci_pct)
        assert (near < 15 < far) == (factor == 1)
        assert change_of(compare(old, new)).comparison.verdict == words[change_pct < 0]


@pytest.mark.parametrize("place", [0, 1])
def test_noise_that_follows_the_probe_is_removed_from_every_arm_s_own_runs(place):
    sides = study(blocks=4, probe_noise=0.1), study({"a": 0.05}, blocks=4, probe_noise=0.1, seed=2)
    old, new = ordered(place, *sides)
    result, change = compared(old, new), effect_change_of(old, new, probes_used=(True, True))
    assert (result.p, result.effect_pct) == (change.p, to_percent(change.estimate))
    assert change.p < 0.01 < effect_change_of(old, new).p


def test_a_block_that_lacks_a_run_is_left_out_with_its_probe():
    def lacking(record):
        return None if (record.block, record.position) == (1, 1) else record

    old = study(blocks=5, probe_noise=0.1, change=lacking)
    new = study(blocks=4, probe_noise=0.1, seed=2)
    result, change = compared(old, new), effect_change_of(old, new, probes_used=(True, True))
    assert result.blocks == 4 and result.p == change.p


@pytest.mark.parametrize("arm", ["base", "arm"])
def test_a_study_in_which_a_run_lacks_its_probe_is_compared_without_probes(arm):
    def lacking(record):
        return replace(record, probe={}) if (record.block, record.arm) == (1, arm) else record

    old = study(blocks=4, probe_noise=0.1, change=lacking)
    new = study(blocks=4, probe_noise=0.1, seed=2)
    assert compared(old, new).p == effect_change_of(old, new, probes_used=(False, True)).p


# --- noise, direction and medians


def test_the_control_of_a_row_withholds_equivalence_in_that_row_alone():
    noisy = {"control_noise": {"b": 0.2}}
    shifts = {"a": 0.0, "b": 0.0, "c": 0.0}
    comparison = compare(study(shifts, **noisy), study(shifts, seed=2, **noisy))
    verdicts = {case: judged(change_of(comparison, case)) for case in shifts}
    assert verdicts["b"] == Verdict("inconclusive", NOISE_EXCEEDS_MARGIN)
    assert verdicts["a"].word == verdicts["c"].word == "equivalent"


def test_the_control_of_a_cell_withholds_equivalence_in_that_cell_alone():
    noisy = {"control_noise": {"a": 0.2}, "name": "noisy"}
    cells = [[study(seed=s, name="quiet"), study(seed=s + 1, **noisy)] for s in (1, 3)]
    comparison = compare_studies(*cells, 2.0)
    words = {c.cell: c.comparison.verdict for c in comparison.changes if c.arm == "arm"}
    assert words == {"quiet": "equivalent", "noisy": "inconclusive"}


@pytest.mark.parametrize(("better", "word"), [("lower", "worse"), ("higher", "better")])
def test_the_direction_of_better_names_a_change(better, word):
    old, new = study(better=better), study({"a": 0.1}, seed=2, better=better)
    assert change_of(compare(old, new)).comparison.verdict == word


def test_the_shown_values_are_the_medians_of_each_study_s_runs():
    def outlier(record):
        if (record.block, record.position) != (0, 0):
            return record
        (case,) = record.cases
        return replace(record, cases=(replace(
            case, metrics=(replace(case.metrics[0], repeats=(50.0,)),)),))  # fmt: skip

    change = change_of(compare(study(change=outlier), study(seed=2, speed=0.5)), arm="base")
    assert (change.old, change.new) == pytest.approx((1.0, np.exp(0.5)), rel=0.01)


@pytest.mark.parametrize("place", [0, 1])
def test_values_without_a_logarithm_are_not_comparable(place):
    def zero(record):
        (case,) = record.cases
        metric = replace(case.metrics[0], repeats=(0.0,))
        return replace(record, cases=(replace(case, metrics=(metric,)),))

    comparison = compare(*ordered(place, study(change=zero), study(seed=2)))
    change = change_of(comparison)
    assert change.comparison.p is None and not comparison.decidable
    assert judged(change) == Verdict(
        "not_comparable", "the studies do not both have a complete block with values above 0"
    )


# --- stalls


MACHINE_STALLS = StallAttribution({"arm": 1.0})
OWN_WORK = StallAttribution({"arm": 1.0}, kept_reason="own work")
UNCLEAR = StallAttribution({"arm": 1.0}, unclear_reasons={"arm": "unclear"})


def stalled(stalls, seed):
    """Return a study whose times are 2 with stalls and 1 without."""
    included, excluded = study(seed=seed, speed=np.log(2)), study(seed=seed)
    shown, other = (included, excluded) if stalls.kept_reason else (excluded, included)
    vars(shown.data)["stalls"] = stalls  # otherwise found in the records, once
    return replace(shown, alternative_rows=other.rows)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("stalls", "median"), [(MACHINE_STALLS, 1.0), (OWN_WORK, 2.0), (UNCLEAR, 2.0)]
)
def test_both_studies_include_stalls_that_may_be_an_arm_s_own_in_either(place, stalls, median):
    old, new = ordered(place, stalled(stalls, 1), stalled(MACHINE_STALLS, 2))
    comparison = compare(old, new)
    change = change_of(comparison)
    assert (change.old, change.new) == pytest.approx((median, median), rel=0.01)
    assert abs(change.comparison.effect_pct) < 1.0
    assert any("stalls" in line for line in comparison.caveats) == (median == 2.0)


# --- rows, cells and refusals


def skipping(case):
    def change(record):
        cases = tuple(
            CaseRecord(c.case, "too large") if c.case == case else c for c in record.cases
        )
        return replace(record, cases=cases)

    return change


@pytest.mark.parametrize("place", [0, 1])
def test_only_rows_that_both_studies_measured_are_compared(place):
    both = {"a": 0.0, "b": 0.0}
    skipped = study(both, change=skipping("b"))
    old, new = ordered(place, skipped, study(both, seed=2))
    comparison = compare(old, new)
    assert {c.row.case for c in comparison.changes} == {"a"}
    assert comparison.caveats == (f"cell: b is only in {('new', 'old')[place]}",)
    assert compared(old, new).p_adjusted == compared(old, new).p  # a family of one row


def test_rows_that_are_not_primary_are_neither_compared_nor_listed():
    def with_secondary(record):
        (case,) = record.cases
        other = replace(case.metrics[0], name="map_us", primary=False)
        return replace(record, cases=(replace(case, metrics=(*case.metrics, other)),))

    old, new = study(change=with_secondary), study(seed=2, change=with_secondary)
    assert {c.row.metric for c in compare(old, new).changes} == {"dispatch_us"}
    assert compare(old, study(seed=2)).caveats == ()
    primary = study(change=with_second_metric)
    for place, side in enumerate(("old", "new")):  # once compared, and called "only in old"
        comparison = compare(*ordered(place, primary, new))
        assert {c.row.metric for c in comparison.changes} == {"dispatch_us"}
        assert comparison.caveats == (f"cell: a: map_us is primary only in {side}",)
    with pytest.raises(StudiesNotComparable, match="no row in common"):
        compare(study(primary=False), study(primary=False))


def test_cells_of_one_name_are_compared_and_others_listed():
    old = [study(name=name) for name in ("one", "two", "gone")]
    new = [study({"a": 0.3}, seed=2, name=name) for name in ("two", "one", "more")]
    comparison = compare_studies(old, new, 2.0)
    assert comparison.caveats == ("gone is only in old", "more is only in new")
    assert [c.cell for c in comparison.changes if c.arm == "arm"] == ["one", "two"]
    assert all(c.comparison.verdict == "worse" for c in comparison.changes if c.arm == "arm")
    with pytest.raises(StudiesNotComparable, match="no cell in common"):
        compare_studies(old[:2], [study(name="x"), study(name="y")], 2.0)


def test_the_only_cells_of_two_studies_are_compared_whatever_their_names():
    comparison = compare(study(name="one"), study({"a": 0.3}, seed=2, name="two"))
    assert [c.cell for c in comparison.changes] == ["one", "one"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("moved", [(0, 0), (2, 5)])
def test_a_run_on_another_kind_of_machine_refuses_either_study(place, moved):
    def move(record):
        if (record.block, record.position) != moved:
            return record
        return replace(record, environment={**MACHINE, "cores": 8})

    old, new = ordered(place, study(change=move), study(seed=2))
    with pytest.raises(StudiesNotComparable, match=r"cores was [28], now [28]"):
        compare(old, new)


@pytest.mark.parametrize("place", [0, 1])
def test_studies_of_different_isolation_are_refused(place):
    old, new = ordered(place, study(isolation="in_process"), study())
    with pytest.raises(StudiesNotComparable, match=r"isolation was \w+, now \w+"):
        compare(old, new)
    undeclared = study(seed=2)
    del undeclared.data.manifest["design"]["isolation"]  # before there was a choice
    assert compare(*ordered(place, undeclared, study())).changes


@pytest.mark.parametrize("place", [0, 1])
def test_an_arm_of_either_study_alone_is_refused(place):
    whole, less = study(), study(seed=2)
    less = replace(less, data=replace(less.data, arms=less.data.arms[:2]))
    with pytest.raises(StudiesNotComparable, match="different arms: only one of them has control"):
        compare(*ordered(place, whole, less))


@pytest.mark.parametrize("place", [0, 1])
def test_the_baseline_of_both_studies_is_the_same_arm(place):
    """An arm was compared with itself."""
    swapped = study(seed=2)
    base, arm, control = swapped.data.arms
    arms = replace(arm, role="baseline"), replace(base, role="arm"), control
    swapped = replace(swapped, data=replace(swapped.data, arms=arms))
    was, now = ordered(place, "arm", "base")
    with pytest.raises(StudiesNotComparable, match=f"cell: the baseline was {was}, now {now}$"):
        compare(*ordered(place, swapped, study()))


@pytest.mark.parametrize("place", [0, 1])
def test_an_option_of_either_study_alone_is_refused(place):
    sides = study(config={"engine": {"chunk": 4}}), study(config={"engine": {}})
    was, now = ordered(place, 4, None)
    with pytest.raises(StudiesNotComparable, match=f"engine.chunk was {was}, now {now}"):
        compare(*ordered(place, *sides))


def test_options_with_other_names_and_defaults_and_new_ones_are_no_difference():
    """As in an archive of an earlier version, which asks the same."""
    former = {"name": "paged", "server": {"preset": "mlx_lm", "start_timeout_s": 300.0},
              "attention": {"gqa_sharing": True}}  # fmt: skip
    today = {"name": "paged", "server": {"preset": "mlx_lm", "requirements": []},
             "attention": {"unit": "auto"}, "kv": {"free_list": "lifo"}}  # fmt: skip
    assert compare(study(config={"engine": former}), study(config={"engine": today}))
    other = {**today, "kv": {"free_list": "fifo"}}
    with pytest.raises(StudiesNotComparable, match="free_list was lifo, now fifo"):
        compare(study(config={"engine": former}), study(config={"engine": other}))


# --- notes


def test_the_note_on_undecided_rows_counts_them_and_gives_the_extremes():
    def loud(record):
        scale = {"a": 1, "b": 20, "c": 60}
        rng = np.random.default_rng([record.block, record.position])
        cases = tuple(
            replace(c, metrics=tuple(
                replace(m, repeats=(float(np.exp(rng.normal(0, 0.005 * scale[c.case]))),))
                for m in c.metrics)) for c in record.cases
        )  # fmt: skip
        return replace(record, cases=cases)

    shifts = dict.fromkeys("cab", 0.0)
    old = study(shifts, change=loud)
    new = study(shifts, seed=2)
    comparison = compare(old, new)
    mde = {case: change_of(comparison, case).comparison.mde_pct for case in shifts}
    assert {c: change_of(comparison, c).comparison.verdict for c in "abc"} == {
        "a": "equivalent", "b": "inconclusive", "c": "inconclusive"}  # fmt: skip
    assert mde["b"] < mde["c"]
    assert comparison.notes[0] == (
        "Not decided in 2 rows: the smallest detectable change is "
        f"{mde['b']:.1f} % (b, arm) to {mde['c']:.1f} % (c, arm)."
    )


def test_the_note_on_the_control_names_its_largest_change_and_its_smallest_p():
    def shifted(record):
        cases = tuple(
            replace(c, metrics=tuple(
                replace(m, repeats=tuple(r * factors[c.case] for r in m.repeats))
                for m in c.metrics)) for c in record.cases
        )  # fmt: skip
        return replace(record, cases=cases) if record.arm == "control" else record

    factors = {"a": 1.01, "b": 1.0, "c": 0.9}
    shifts = dict.fromkeys("abc", 0.0)
    noise = {"control_noise": {"c": 0.1}}
    old, new = study(shifts, **noise), study(shifts, seed=2, change=shifted, **noise)
    note = compare(old, new).notes[-1]
    assert "changed by at most −2.3% (c); smallest p 4e-5 (a), unadjusted" in note


def with_second_metric(record):
    cases = tuple(
        replace(c, metrics=(*c.metrics, *(replace(m, name="map_us") for m in c.metrics)))
        for c in record.cases
    )
    return replace(record, cases=cases)


def test_a_row_of_all_requests_is_named_by_its_metric_in_every_note():
    old, new = (study({"all": 0.0}, noise=0.05, seed=seed) for seed in (1, 2))
    comparison = compare(old, new)
    assert comparison.notes[0].endswith(" % (dispatch_us, arm).")
    assert comparison.notes[-1].count("(dispatch_us)") == 2


@pytest.mark.parametrize(("case", "row"), [("a", "a: map_us"), ("all", "map_us")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_metric_of_one_study_alone_is_named(place, case, row):
    two = study({case: 0.0}, change=with_second_metric)
    comparison = compare(*ordered(place, two, study({case: 0.0}, seed=2)))
    assert comparison.caveats == (f"cell: {row} is only in {('old', 'new')[place]}",)


@pytest.mark.parametrize(
    ("other", "old_text", "new_text"),
    [
        ({"unit": "ms"}, "a in us (lower is better)", "a in ms (lower is better)"),
        ({"better": "higher"}, "a in us (lower is better)", "a in us (higher is better)"),
    ],
)
def test_a_metric_of_the_same_name_in_another_unit_is_not_compared(other, old_text, new_text):
    def change(record):
        cases = tuple(
            replace(case, metrics=tuple(replace(m, **other) for m in case.metrics))
            if case.case == "a"
            else case
            for case in record.cases
        )
        return replace(record, cases=cases)

    shifts = {"a": 0.0, "b": 0.0}
    comparison = compare(study(shifts), study(shifts, seed=2, change=change))
    assert {one.row.case for one in comparison.changes} == {"b"}
    expected = (f"cell: {old_text} is only in old", f"cell: {new_text} is only in new")
    assert comparison.caveats == expected


def printed_changes(comparison, width):
    out = io.StringIO()
    print_changes(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_two_metrics_of_a_case_have_names_of_their_own_in_the_table():
    old, new = (study(change=with_second_metric, seed=seed) for seed in (1, 2))
    text = printed_changes(compare(old, new), 120)
    assert re.search(r"^ +row +arm ", text, re.M)
    for row in ("a: dispatch_us", "a: map_us"):
        assert len(re.findall(rf"^ +{row} +(?:base|arm) ", text, re.M)) == 2


def test_rows_of_several_cells_are_told_apart():
    """The lines of all cells were alike: ``total_tok_s paged``."""
    old = [study({"all": 0.0}, noise=0.05, name=name) for name in ("one", "two")]
    new = [study({"all": 0.0}, noise=0.05, name=name, seed=2) for name in ("one", "two")]
    new[1].gates["healthy"].fail("a reason", "arm", "swap grew")
    comparison = compare_studies(old, new, 2.0)
    assert comparison.notes[0].endswith(" % (one: dispatch_us, arm).")
    assert re.search(r"\((one|two): dispatch_us\), unadjusted", comparison.notes[-1])
    text = printed_changes(comparison, 120)
    assert re.search(r"^ +cell +row +arm ", text, re.M)
    for name in ("one", "two"):
        for arm in ("base", "arm"):
            assert len(re.findall(rf"^ +{name} +dispatch_us +{arm} ", text, re.M)) == 1
    assert "\ntwo: dispatch_us, arm: invalid: new: swap grew" in text


@pytest.mark.parametrize("place", [0, 1])
def test_studies_with_other_prompts_are_refused_but_not_with_other_code(place):
    one = study(inputs={"workload.prompts.path": "aa", "engine.name/mine.py": "bb"})
    other = study(seed=2, inputs={"workload.prompts.path": "cc", "engine.name/mine.py": "bb"})
    with pytest.raises(
        StudiesNotComparable, match=r"file of workload.prompts.path was \w\w\.\.\., now"
    ):
        compare(*ordered(place, one, other))
    code = study(seed=2, inputs={"workload.prompts.path": "aa", "engine.name/mine.py": "dd"})
    for same in (code, study(seed=2)):  # an older version wrote no digests
        assert compare(*ordered(place, one, same)).changes
