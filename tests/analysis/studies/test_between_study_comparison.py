"""Comparisons of two studies: changes, refusals and exit codes."""

import io
import json
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planted_cells import compare_studies
from rich.console import Console

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.pages.terminal_report import print_changes
from labkit.analysis.statistics.difference_in_differences import (
    StudyEffect,
    effect_change,
    estimate_effect,
)
from labkit.analysis.statistics.hodges_lehmann import breakpoints
from labkit.analysis.statistics.multiple_comparisons import holm
from labkit.analysis.studies.between_study_comparison import compare_with_first
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.compare import main
from labkit.records import DIGESTS_FILE, publish_arm, read_arm


def machine(**fields):
    def apply(record):
        return replace(record, environment={**record.environment, **fields})

    return apply


def scaled(record, factors):
    """Multiply each case's metrics by ``factors[case]``."""
    cases = tuple(
        replace(c, metrics=tuple(replace(m, repeats=tuple(x * factors[c.case] for x in m.repeats))
                                 for m in c.metrics))
        for c in record.cases
    )  # fmt: skip
    return replace(record, cases=cases)


def noisy(seed, sd, speed=1.0, probe=None):
    """Return a change that adds noise per run and case, on a machine ``speed`` times slower."""

    def apply(record):
        rng = np.random.default_rng([seed, record.block, record.position])
        factors = {c.case: speed * float(np.exp(rng.normal(0, sd))) for c in record.cases}
        slow = speed if probe is None else probe
        before = {name: us * slow for name, us in record.probe["before"].items()}
        return replace(scaled(record, factors), probe={"before": before})

    return apply


def joint_p_by_hand(old, new, runs):
    """Enumerate the joint p of "nothing changed" from the definition, without a probe."""

    def labellings(blocks):
        size = 2 * runs
        block_labels = [c for c in product((0, 1), repeat=size) if sum(c) == runs]
        return [np.array(c) for c in product(block_labels, repeat=blocks)]

    def difference(values, labels):
        arm = labels.astype(bool)
        return values[arm].mean() - values[~arm].mean()

    observed_labels = [np.array([[0] * runs + [1] * runs] * len(v)) for v in (old, new)]
    effects = [difference(v, g) for v, g in zip((old, new), observed_labels, strict=True)]
    variances = [
        ((v - v.mean(axis=1, keepdims=True) - e * (g - 0.5)) ** 2).sum() / (v.size * 0.5)
        for v, g, e in zip((old, new), observed_labels, effects, strict=True)
    ]
    assert old.shape == new.shape
    weight = variances[0] / sum(variances)
    common = (1 - weight) * effects[0] + weight * effects[1]
    residuals = [v - common * g for v, g in zip((old, new), observed_labels, strict=True)]
    observed = effects[1] - effects[0]
    differences = [
        difference(residuals[1], b) - difference(residuals[0], a)
        for a in labellings(len(old)) for b in labellings(len(new))
    ]  # fmt: skip
    upper, lower = (np.mean(s * np.array(differences) >= s * observed - 1e-12) for s in (1, -1))
    return min(1.0, 2 * min(upper, lower))


@pytest.mark.parametrize("seed", range(4))
def test_the_joint_p_matches_its_definition(seed):
    rng = np.random.default_rng(seed)
    old, new = rng.normal(0, 1, (2, 2, 4))
    new[:, 2:] += 2.0
    effects = [estimate_effect(v[:, :2], v[:, 2:], None) for v in (old, new)]
    change = effect_change(*effects)
    assert change.exact and change.count == 36 * 36
    assert change.p == pytest.approx(joint_p_by_hand(old, new, 2), abs=1e-12)


def simulated_change(rng, sds, changed=0.0, follows=0.0, blocks=4):
    """Simulate two studies' effects, 5 % and 5 % + ``changed``, one machine 15 % slower."""
    effects = []
    for sd, shift, speed in zip(sds, (0.0, changed), (0.0, 0.15), strict=True):
        probe = rng.normal(0, 0.05, (2, blocks, 2))
        values = follows * probe + rng.normal(0, sd, (2, blocks, 2)) + speed
        values += rng.normal(0, 0.1, (1, blocks, 1))
        values[1] += 0.05 + shift
        effects.append(estimate_effect(values[0], values[1], (probe[0] + speed, probe[1] + speed)))
    return effect_change(*effects)


@pytest.mark.usefixtures("fewer_pairs")
@pytest.mark.parametrize(
    ("sds", "changed", "follows"),
    [
        pytest.param((0.05, 0.05), 0.0, 0.0, marks=pytest.mark.slow),
        pytest.param((0.08, 0.01), 0.03, 0.0, marks=pytest.mark.slow),
        ((0.03, 0.03), -0.1, 1.0),
    ],
)
def test_simulated_error_rate_and_coverage(sds, changed, follows):
    """Simulates 400 studies; two binomial standard errors of 0.05 are 0.022."""
    rng = np.random.default_rng(11)
    false, covered = 0, 0
    for _ in range(400):
        change = simulated_change(rng, sds, changed, follows)
        limits = breakpoints(change.null_distribution, change.label_correlation).interval(0.05)
        covered += limits is None or limits[0] <= changed <= limits[1]
        false += changed == 0 and change.p <= 0.05
    assert covered / 400 >= 0.92
    assert false / 400 <= 0.08


@pytest.mark.usefixtures("fewer_pairs")
def test_power_at_the_smallest_detectable_change():
    rng = np.random.default_rng(12)
    detectable = [simulated_change(rng, (0.05, 0.03)).mde_pct(0.05) for _ in range(30)]
    changed = np.log1p(np.median(detectable) / 100)
    detected = sum(simulated_change(rng, (0.05, 0.03), changed).p <= 0.05 for _ in range(300))
    assert 0.68 <= detected / 300 <= 0.92


@pytest.mark.usefixtures("fewer_pairs")
def test_noise_that_follows_the_probe_is_removed():
    """Most of the runs' noise follows the probe, so its use narrows the interval."""
    rng = np.random.default_rng(13)
    with_probe, without = [], []
    for _ in range(20):
        probe = rng.normal(0, 0.1, (2, 2, 6, 2))
        values = probe + rng.normal(0, 0.02, probe.shape)
        for known, widths in ((True, with_probe), (False, without)):
            both = [estimate_effect(v[0], v[1], (p[0], p[1]) if known else None)
                    for v, p in zip(values, probe, strict=True)]  # fmt: skip
            change = effect_change(*both)
            low, high = breakpoints(change.null_distribution, change.label_correlation).interval(
                0.05
            )
            widths.append(high - low)
    assert np.median(with_probe) < 0.4 * np.median(without)


def test_one_probe_for_all_arms_of_a_process_removes_nothing():
    rng = np.random.default_rng(14)
    values, probe = rng.normal(0, 1, (2, 10, 1)), rng.normal(0, 1, (10, 1))
    same, none = (estimate_effect(*values, known) for known in ((probe, probe), None))
    assert isinstance(same, StudyEffect) and np.array_equal(
        same.null_distribution, none.null_distribution
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("speed", "probe"), [(1.15, 1.15), (1.15, 1.0), (0.87, 0.9)])
def test_an_unchanged_kernel_on_a_machine_of_another_speed_is_no_change(
    make_cell, seed, speed, probe
):
    """Once "-15.7 %, p = .037" was claimed; also if the probe missed the machine's change."""
    cases = tuple("abcdefgh")
    old = make_cell(f"old{seed}/cell", cases=cases, change=noisy(seed, 0.05)).parent
    new = make_cell(f"new{seed}/cell", cases=cases, seed=2,
                    change=noisy(100 + seed, 0.05, speed, probe)).parent  # fmt: skip
    comparison = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 2.0)
    for change in comparison.changes:
        assert change.comparison.verdict in ("inconclusive", "not_comparable")
        assert change.new / change.old == pytest.approx(speed, rel=0.12)
        if change.arm == "binary_search":
            assert (change.comparison.verdict, change.comparison.p) == ("not_comparable", None)
        else:
            assert change.comparison.p_adjusted > 0.05 and abs(change.comparison.effect_pct) < 15
    adjusted_ps = [
        c.comparison.p_adjusted for c in comparison.changes if c.comparison.p is not None
    ]
    assert len(adjusted_ps) == 8 and np.median(adjusted_ps) > 0.3  # nor does it come close


def test_the_old_and_the_new_number_are_medians_of_runs(make_cell):
    def stalled(record):
        return scaled(record, {"a": 50.0 if record.block == 1 else 1.0})

    options = {"cases": ("a",), "noise": 0.0, "runs": 1, "change": stalled}
    old, new = (make_cell(f"{name}/cell", **options).parent for name in ("old", "new"))
    comparison = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 2.0)
    for change in comparison.changes:
        factor = 0.95 if change.arm == "seq_map" else 1.0
        assert change.old == change.new == pytest.approx(322.6 * 1.001 * factor)


def test_an_arm_that_changed_is_named_on_a_machine_of_another_speed(make_cell):
    old = make_cell("old/cell", change=noisy(1, 0.01)).parent
    new = make_cell("new/cell", effects={"seq_map": 1.3}, change=noisy(2, 0.01, 1.15)).parent
    comparison = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 2.0)
    words = {(c.row.case, c.arm): c.comparison.verdict for c in comparison.changes}
    assert {word for (_, arm), word in words.items() if arm == "seq_map"} == {"worse"}
    assert {word for (_, arm), word in words.items() if arm != "seq_map"} == {"not_comparable"}
    low, high = comparison.changes[1].comparison.ci_pct
    assert low < 100 * (1.3 / 0.95 - 1) < high


def test_a_change_below_that_of_the_machine_is_not_claimed(make_cell, capsys):
    """An arm may depend on the part of the machine that slowed, and the baseline not."""
    old = make_cell("old/cell", effects={"seq_map": 1.0}, change=noisy(1, 0.005)).parent
    new = make_cell("new/cell", effects={"seq_map": 1.08}, change=noisy(2, 0.005, 1.15)).parent
    assert main([str(old), str(new), "--fail-on", "worse"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "is neither claimed nor ruled out" in out and "inconclusive" in out
    assert "Not decided in 2 rows: the smallest detectable change is" in out
    flat = make_cell("flat/cell", effects={"seq_map": 1.0}, change=noisy(3, 0.002, 1.15)).parent
    still = make_cell("still/cell", effects={"seq_map": 1.0}, change=noisy(1, 0.002)).parent
    comparison = compare_studies(*(AnalysisCache().study(s) for s in (still, flat)), 2.0)
    assert {c.comparison.verdict for c in comparison.changes if c.comparison.p is not None} == {
        "inconclusive"
    }
    same = make_cell("same/cell", effects={"seq_map": 1.08}, change=noisy(2, 0.005)).parent
    assert main([str(old), str(same), "--fail-on", "worse"]) == 1


@pytest.mark.parametrize("probe", [1.1, 1 / 1.1], ids=["slower machine", "faster machine"])
@pytest.mark.parametrize(("arm", "word"), [(1.1, "worse"), (1 / 1.1, "better")])
def test_a_claim_needs_the_whole_interval_beyond_the_machine_s_change(make_cell, probe, arm, word):
    """Whichever way either changed: an end of the interval within it decides nothing."""

    def change(effect):
        options = {"cases": ("a",), "effects": {"x": effect}}
        old = make_cell(f"{effect}/old/cell", cases=("a",), effects={"x": 1.0}).parent
        new = make_cell(f"{effect}/new/cell", change=noisy(2, 0.01, 1.0, probe), **options).parent
        comparison = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 2.0)
        assert any("the machine itself changed" in line for line in comparison.caveats)
        (change,) = (c for c in comparison.changes if c.arm == "x")
        return change

    near, far = change(arm), change(arm**3)
    shift = abs(100 * (probe - 1))
    low, high = sorted(map(abs, near.comparison.ci_pct))
    assert low < shift < high and near.comparison.p_adjusted <= 0.05
    assert near.comparison.verdict == "inconclusive" and "machine itself" in near.comparison.reason
    assert far.comparison.verdict == word


def test_many_rows_are_adjusted_by_holm(make_cell):
    """One of eight rows with p below 0.05 by chance is not claimed."""
    cases = tuple("abcdefgh")
    changes_compared = []
    for seed in range(40):
        old = make_cell(f"old{seed}/cell", cases=cases, change=noisy(seed, 0.03)).parent
        new = make_cell(f"new{seed}/cell", cases=cases, change=noisy(500 + seed, 0.03)).parent
        changes = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 2.0).changes
        changes_compared = [c for c in changes if c.comparison.p is not None]
        if sum(c.comparison.p <= 0.05 for c in changes_compared) and len(changes_compared) == 8:
            break
    raw = sorted(c.comparison.p for c in changes_compared)
    expected = np.minimum(1, np.maximum.accumulate(np.array(raw) * np.arange(8, 0, -1)))
    adjusted = sorted(c.comparison.p_adjusted for c in changes_compared)
    assert adjusted == pytest.approx(list(expected)) and raw[0] <= 0.05 < adjusted[0]
    assert {c.comparison.verdict for c in changes_compared} == {"inconclusive"}
    for c in changes_compared:  # the interval is at the level of the p that is shown
        low, high = c.comparison.ci_pct
        assert low < 0 < high


def test_studies_with_a_baseline_alone_are_shown_but_cannot_pass_in_ci(make_cell, capsys):
    old, new = (make_cell(f"{n}/cell", effects={}).parent for n in ("old", "new"))
    assert main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "not comparable in time" in out and "arms of one study" in " ".join(out.split())
    assert main([str(old), str(new), "--fail-on", "worse"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_control_s_own_change_is_printed(make_cell, capsys):
    old, new = (make_cell(f"{n}/cell", change=noisy(i, 0.01)).parent
                for i, n in enumerate(("old", "new")))  # fmt: skip
    main([str(old), str(new)])
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"A/A control: its difference from the baseline changed by at most", out)
    assert "Monte Carlo, 100,000 draws" in out and "exact" not in out


def test_a_narrow_terminal_shows_whole_names(make_cell):
    study, out = AnalysisCache().study(make_cell("study/cell").parent), io.StringIO()
    print_changes(compare_studies(study, study, 2.0), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert any(re.match(r" decode, 64 .*seq_map .*equivalent", line) for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_output_without_a_terminal_has_the_old_and_the_new_medians(make_cell, capsys, monkeypatch):
    """It had the width of a terminal of 80 characters, which leaves these columns out."""
    monkeypatch.setenv("COLUMNS", "80")
    folder = str(make_cell("study/cell").parent)
    main([folder, folder])
    assert re.search(r"^ *row +arm +old +new ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("scale", "flags", "code", "word"),
    [
        (1.0, ["--fail-on", "worse"], 0, "equivalent"),
        (1.06, ["--fail-on", "worse"], 1, "worse"),
        (1.06, ["--fail-on", "slower"], 1, "worse"),  # the name of older versions
        (1.06, [], 0, "worse"),
        (1.06, ["--fail-on", "worse", "--margin", "10%"], 0, "trivial"),
        (0.9, ["--fail-on", "worse"], 0, "better"),
    ],
)
def test_verdict_and_exit_code(make_cell, capsys, scale, flags, code, word):
    old = make_cell("old/cell", seed=1).parent
    new = make_cell("new/cell", seed=2, effects={"seq_map": 0.95 * scale}).parent
    assert main([str(old), str(new), *flags]) == code
    assert word in capsys.readouterr().out


@pytest.mark.parametrize(("scale", "code"), [(1.025, 1), (1.015, 0)])
def test_changes_below_two_percent_do_not_matter_by_default(make_cell, scale, code):
    old = make_cell("old/cell", effects={"seq_map": 1.0}, noise=0.0005).parent
    new = make_cell("new/cell", effects={"seq_map": scale}, noise=0.0005, seed=2).parent
    assert main([str(old), str(new), "--fail-on", "worse"]) == code


def test_each_of_several_verdicts_may_fail_a_comparison(make_cell):
    old = make_cell("old/cell").parent
    new = make_cell("new/cell", effects={"seq_map": 1.2}, seed=2).parent
    assert main([str(old), str(new), "--fail-on", "worse", "--fail-on", "inconclusive"]) == 1
    assert main([str(old), str(new), "--fail-on", "better", "--fail-on", "inconclusive"]) == 0


def test_invalid_rows_fail_a_comparison_even_if_no_row_can_be_compared(make_cell):
    def crash(record):
        if record.arm == "seq_map":
            return replace(record, outcome="crashed", detail="SIGSEGV", cases=())
        return record

    old, new = make_cell("old/cell").parent, make_cell("new/cell", change=crash).parent
    assert main([str(old), str(new), "--fail-on", "invalid"]) == 1
    assert main([str(old), str(new), "--fail-on", "worse"]) == 2


def refusal(capsys, old, new):
    assert main([str(old), str(new)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_other_machines_are_refused_but_not_other_hosts(make_cell, capsys):
    old = make_cell("old/cell", change=machine(memory_bytes=8 << 30)).parent
    other = make_cell("other/cell", change=machine(cpu_model="another")).parent
    assert "cpu_model was test, now another" in refusal(capsys, old, other)
    less = make_cell("less/cell", change=machine(memory_bytes=4 << 30)).parent
    assert "memory_bytes" in refusal(capsys, old, less)
    host = machine(host="h2", memory_bytes=(8 << 30) - (1 << 20))
    assert main([str(old), str(make_cell("host/cell", change=host).parent)]) == 0


def test_other_configs_and_arms_are_refused(make_cell, capsys):
    old = make_cell("old/cell").parent
    new = make_cell("new/cell").parent
    arm = read_arm(new / "cell" / "arms" / "seq_map.json")
    engine = {**arm.config["engine"], "attention": {"device": "metal"}}
    publish_arm(new / "cell", replace(arm, config={**arm.config, "engine": engine}))
    message = refusal(capsys, old, new)
    assert "configs of arm seq_map differ: engine.attention.device was cpu, now metal" in message
    arms = make_cell("arms/cell", effects={"identity": 1.0}).parent
    assert "different arms: only one of them has identity, seq_map" in refusal(capsys, old, arms)


def test_an_edited_record_is_refused_and_an_old_study_is_named_once(make_cell, capsys):
    old, new = (make_cell(f"{name}/cell").parent for name in ("old", "new"))
    (old / "cell" / DIGESTS_FILE).unlink()
    assert main([str(old), str(new)]) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert f"note: {old}: 24 of 24 records have no digest" in note
    record = next((new / "cell" / "runs").glob("*seq_map.json"))
    record.write_text(record.read_text().replace('"repeats": [', '"repeats": [9'))
    assert f"{record.name} was edited after it was written" in refusal(capsys, old, new)


def test_unshared_rows_are_listed_and_studies_without_shared_rows_refused(make_cell, capsys):
    """An empty table with exit code 0 would always pass in CI."""
    old = make_cell("old/cell", cases=("a", "b")).parent
    new = make_cell("new/cell", cases=("b", "c")).parent
    assert main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "a is only in old" in out and "c is only in new" in out
    other = make_cell("other/cell", cases=("c",)).parent
    assert "no row in common" in refusal(capsys, old, other)
    skipping = make_cell("skipping/cell", cases=("a",), skipped={"a": "too large"}).parent
    assert "no row in common" in refusal(capsys, make_cell("a/cell", cases=("a",)).parent, skipping)


def test_a_study_that_cannot_be_read_is_one_line(make_cell, capsys, tmp_path):
    old = make_cell("old/cell").parent
    assert "no such directory" in refusal(capsys, old, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no cell" in refusal(capsys, old, tmp_path / "empty")
    with pytest.raises(SystemExit) as stop:
        main([str(old), str(old), "--margin", "fast"])
    assert stop.value.code == 2
    assert "must be above 0 and at most 50 (percent)" in capsys.readouterr().err


def test_few_runs_are_estimate_only_and_failed_gates_invalid(make_cell, capsys):
    old = make_cell("old/cell", blocks=2).parent
    new = make_cell("new/cell", blocks=2, effects={"seq_map": 1.5}).parent
    assert main([str(old), str(new), "--fail-on", "worse"]) == 2  # it could never fail
    assert "estimate-only" in capsys.readouterr().out

    def crash(record):
        if record.block == 0 and record.arm == "seq_map":
            return replace(record, outcome="crashed", detail="SIGSEGV", cases=())
        return record

    broken = make_cell("broken/cell", change=crash).parent
    good = make_cell("good/cell").parent
    assert main([str(good), str(broken), "--fail-on", "invalid"]) == 1


def test_comparing_does_not_import_slow_modules(make_cell):
    """Each of these modules takes longer to import than the comparison runs."""
    old, new = (make_cell(f"{name}/cell").parent for name in ("old", "new"))
    code = (
        "import sys; from labkit.compare import main; main(sys.argv[1:]); "
        "print(*{'scipy.stats', 'pandas', 'matplotlib', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(old), str(new)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""


def test_a_study_that_grew_after_its_results_were_shown_claims_no_change(make_cell):
    old = make_cell("old/cell").parent
    new = make_cell("new/cell", effects={"seq_map": 1.5}).parent
    cell = new / "cell" / "cell.json"
    facts = json.loads(cell.read_text())
    facts["design"]["shown"] = [3]
    cell.write_text(json.dumps(facts))
    comparison = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 2.0)
    (word,) = {c.comparison.verdict for c in comparison.changes if c.arm == "seq_map"}
    assert word == "estimate_only"
    reason = next(c.comparison.reason for c in comparison.changes if c.arm == "seq_map")
    assert reason.startswith("new: exploratory: blocks were added")


def test_equivalence_is_adjusted_for_the_family(make_cell):
    """The p of equivalence is multiplied by the number of rows."""
    cases = tuple("abcdefgh")
    comparisons = {}
    for many in (True, False):
        old, new = (
            make_cell(f"{name}{many}/cell", cases=cases if many else cases[:1], effects={"x": 1.0},
                      change=noisy(i, 0.01)).parent
            for i, name in enumerate(("old", "new"))
        )  # fmt: skip
        changes = compare_studies(*(AnalysisCache().study(s) for s in (old, new)), 3.0).changes
        comparisons[many] = next(
            c.comparison for c in changes if c.row.case == "a" and c.arm == "x"
        )
    assert comparisons[True].p == pytest.approx(comparisons[False].p)
    assert comparisons[True].equivalence.p == pytest.approx(
        min(1.0, 8 * comparisons[False].equivalence.p)
    )
    assert 0 < comparisons[True].equivalence.p < 1


def test_each_later_study_is_compared_with_the_first(make_cell, capsys):
    old = make_cell("old/cell", blocks=8, noise=0.002).parent
    same = make_cell("same/cell", blocks=8, noise=0.002, seed=2).parent
    slower = make_cell(
        "slower/cell", blocks=8, noise=0.002, seed=3, effects={"seq_map": 1.2}
    ).parent
    assert main([str(old), str(same), str(slower), "--fail-on", "worse"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"to {same}" in out and out.index(f"to {same}") < out.index(f"to {slower}")
    assert "worse" in out and "adjusted over 4 comparisons (Holm)" in out
    assert main([str(old), str(same), "--fail-on", "worse"]) == 0


def test_p_is_adjusted_over_all_later_studies(make_cell):
    cache = AnalysisCache()
    old, *later = (
        cache.study(make_cell(f"{name}/cell", seed=seed).parent)
        for seed, name in enumerate(("old", "new", "newer"), 1)
    )
    alone = [compare_studies(old, new, 2.0) for new in later]
    together = compare_with_first(old, later, 2.0)
    ps = [item.comparison.p for one in alone for item in one.changes
          if item.comparison.p is not None]  # fmt: skip
    adjusted = [item.comparison.p_adjusted for one in together for item in one.changes
                if item.comparison.p is not None]  # fmt: skip
    assert adjusted == pytest.approx(holm(ps))


def test_studies_are_compared_cell_by_cell(make_cell, monkeypatch):
    """Both studies were in memory as a whole, with every change's null distribution."""
    for study, seed in product(("old", "new"), (1, 2, 3)):
        folder = make_cell(f"{study}/seed={seed}", blocks=2, cases=("one",), seed=seed)
    old, new = (folder.parent.with_name(name) for name in ("old", "new"))
    expected = compare_studies(*(AnalysisCache().study(path) for path in (old, new)), 2.0)
    made, most = [], []

    def tracked(*arguments):
        most.append(sum(one() is not None for one in made))
        analysis = analyse(*arguments)
        made.append(weakref.ref(analysis))
        return analysis

    monkeypatch.setattr("labkit.analysis.studies.study_analysis.analyse", tracked)
    cache = AnalysisCache(max_records=1)
    comparison = compare_studies(*(cache.lazily(path) for path in (old, new)), 2.0)
    assert len(most) == 6 and max(most) <= 3 and comparison.notes == expected.notes
    assert [(one.cell, one.comparison) for one in comparison.changes] == [
        (one.cell, one.comparison) for one in expected.changes
    ]
