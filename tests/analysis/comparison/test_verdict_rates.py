"""Simulated error rates of whole studies: verdicts, intervals and detectable effects.

Every design that ships is simulated with 1, 3 and 10 rows that have noise in common and
noise of their own, looks and added blocks included, through the comparison and the verdict
that a report uses. Fixed seeds; the quick sizes run always, the figures of
``docs/statistical-methods.md`` are those of the slow ones (4,000 studies each).
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from labkit.analysis.comparison.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.observations import MetricRow, RunValue, log_values
from labkit.analysis.comparison.verdict import judge
from labkit.analysis.statistics.hodges_lehmann import to_log_ratio
from labkit.analysis.statistics.interim_analysis import alpha_at, parse_looks, withheld_reason
from labkit.analysis.statistics.power import single_row_mde_pct
from labkit.config import Design, Isolation, PlannedLook, to_plain
from labkit.records import unpack_archive

pytestmark = pytest.mark.usefixtures("fewer_relabellings")
ROOT = Path(__file__).parents[3]
CONF = ROOT / "conf" / "design"
REFERENCE = ROOT / "outputs" / "reference" / "seq_map.zip"
SD = 0.01
MARGIN = 2.0
ROWS = (1, 3, 10)
QUICK_ROWS = (1, pytest.param(3, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.slow))
KINDS = ("clean", "drift", "modes", "tails")


# Where blocks and looks follow from the time: those that were fixed before.
FIXED = {"standard": {"blocks": 10, "looks": [{"blocks": 8, "alpha": 0.02}]}}


def shipped_design(name, runs=1):
    """Return a design of ``conf/design``, or the same with ``runs`` per block in fewer blocks."""
    plain = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    plain = {**plain, **FIXED.get(name, {})}
    looks = [PlannedLook(one["blocks"] // runs, one["alpha"]) for one in plain.pop("looks", [])]
    plain |= {"blocks": plain["blocks"] // runs, "runs_per_block": runs, "looks": looks}
    design = Design(**plain, isolation=Isolation.process)
    return replace(design, looks=design.all_looks)


SHIPPED = ("standard", "strict", "sequential")
DESIGNS = {name: shipped_design(name) for name in SHIPPED} | {
    f"{pairs.blocks} of 2": pairs for pairs in (shipped_design(name, 2) for name in SHIPPED)
}


def consecutive_noise(rng, kind, size, rows):
    """Return log noise of consecutive processes, float64 [size, rows], sd about ``SD``."""
    half = SD / math.sqrt(2)
    left = rng.normal(0, half, (size, 1)) + rng.normal(0, half, (size, rows))
    if kind == "drift":
        left += np.linspace(0, 0.05, size)[:, None]
    if kind == "modes":
        left += 0.05 * (rng.random((size, 1)) < 0.25)
    if kind == "tails":
        left += (rng.random((size, rows)) < 0.05) * rng.exponential(0.08, (size, rows))
    return left


def simulate_processes(rng, kind, design, rows):
    """Return noise of new processes in random order, float64 [2, blocks, runs, rows]."""
    blocks, runs = design.blocks, design.runs_per_block
    table = consecutive_noise(rng, kind, blocks * 2 * runs, rows).reshape(blocks, 2 * runs, rows)
    order = rng.permuted(np.tile(np.arange(2 * runs), (blocks, 1)), axis=1)
    table = np.take_along_axis(table, order[..., None], axis=1)
    return table.reshape(blocks, 2, runs, rows).transpose(1, 0, 2, 3)


def as_rows(values):
    """Return rows of a cell from log values, float64 [2, blocks, runs, rows]."""
    return [
        MetricRow(f"case {i}", "us", "us", "lower", True, arms={
            arm: [
                RunValue(b, r, "", float(x))
                for b, block in enumerate(np.exp(table)) for r, x in enumerate(block)
            ]
            for arm, table in zip(("base", "arm"), values[..., i], strict=True)
        })
        for i in range(values.shape[-1])
    ]  # fmt: skip


def levels_of(design, done, planned, shown):
    looks = parse_looks([to_plain(look) for look in design.looks], design.alpha)
    why = withheld_reason(done, planned, looks, shown)
    alpha = alpha_at(looks, done, design.alpha) if why is None else 0.0
    return DecisionCriteria(design.runs_per_block, alpha, design.margin_pct, why)


def answers(design, values, planned=None, shown=(), arms=1):
    """Return the comparisons and verdicts on the blocks of ``values``."""
    criteria = levels_of(design, values.shape[1], planned or values.shape[1], shown)
    comparisons = compare_arm(as_rows(values), "arm", "base", criteria, arms)
    return comparisons, [
        judge(comparison, "lower", criteria, [], None).word for comparison in comparisons
    ]


def test_an_estimate_widens_no_interval_and_has_its_own():
    values = np.random.default_rng(3).normal(0.0, 0.01, (2, 10, 1, 6))
    criteria = levels_of(Design(blocks=10, runs_per_block=1), 10, 10, ())
    rows = as_rows(values)
    whole, alone = (compare_arm(some, "arm", "base", criteria) for some in (rows, rows[2:]))
    *estimates, third, _, _, last = compare_arm(rows, "arm", "base", criteria, 1, {0, 1})
    assert [third, last] == [alone[0], alone[-1]] and third != whole[2]
    for one, tested in zip(estimates, whole, strict=False):
        assert one.ci_pct == one.ci_raw_pct == pytest.approx(tested.ci_raw_pct)
        assert one.p_adjusted is None
        verdict = judge(one, "lower", replace(criteria, withheld_reason="why"), [], None)
        assert verdict.word == "estimate_only"


DECIDED = {"better", "worse", "equivalent", "trivial"}


def final_answers(design, values):
    """Return the answers at the first look that decides all rows, else at the last."""
    for look in design.looks:
        comparisons, words = answers(design, values[:, : look.blocks])
        if DECIDED.issuperset(words) or look.blocks == design.blocks:
            return comparisons, words
    return answers(design, values)


def simulate(design, rows, studies, effects=0.0, kind="clean", seed=1):
    rng = np.random.default_rng([seed, rows, design.blocks])
    for _ in range(studies):
        values = simulate_processes(rng, kind, design, rows)
        values[1] += effects
        yield final_answers(design, values)


def rate(events):
    return float(np.mean(list(events)))


def at_most(share, studies, promised=0.05):
    """Return whether a share exceeds the promised one by no more than 3 standard deviations."""
    return share <= promised + 3 * math.sqrt(promised * (1 - promised) / studies)


def false_claim_rate(design, rows, studies, kind):
    """Return the share of A/A studies that call any row faster, slower or trivial."""
    results = simulate(design, rows, studies, kind=kind)
    return rate(bool({"better", "worse", "trivial"} & set(words)) for _, words in results)


def false_equivalence_rate(design, rows, studies):
    """Return the share of studies with effects at the margin that call any row equivalent."""
    narrow = replace(design, margin_pct=MARGIN * 2)
    results = simulate(narrow, rows, studies, effects=to_log_ratio(MARGIN * 2) * 1.0001, seed=2)
    return rate(bool({"equivalent", "trivial"} & set(words)) for _, words in results)


def coverage(design, rows, studies, kind):
    """Return the share of studies in which every shown interval contains the true effect."""
    effects = np.linspace(-0.03, 0.05, rows) if rows > 1 else np.array([0.03])
    true = 100 * np.expm1(effects)
    return rate(
        all(
            comparison.ci_pct is not None and comparison.ci_pct[0] <= effect <= comparison.ci_pct[1]
            for comparison, effect in zip(comparisons, true, strict=True)
        )
        for comparisons, _ in simulate(design, rows, studies, effects, kind, seed=3)
    )


def power_as_printed(design, rows, studies):
    """Return the share of studies that detect the effect which another study of them prints.

    Each study's last look is compared with every other's printed figure. A study detects every
    effect that moves its interval above 0, so A/A studies tell the power of all effects.
    """
    alpha = design.looks[-1].alpha if design.looks else design.alpha
    criteria = DecisionCriteria(design.runs_per_block, alpha, design.margin_pct)
    rng, lows, printed = np.random.default_rng([8, rows, design.blocks]), [], []
    for _ in range(studies):
        values = simulate_processes(rng, "clean", design, rows)
        first = compare_arm(as_rows(values), "arm", "base", criteria)[0]
        lows.append(to_log_ratio(first.ci_pct[0]))
        printed.append(to_log_ratio(first.mde_pct))
    return float(np.mean(np.array(printed) + np.array(lows)[:, None] > 0))


def power(design, rows, studies):
    """Return the share of studies that detect an effect of the stated size in one row.

    The stated size is that of the median study, relative to its own noise; all looks count.
    """
    last = [look.blocks for look in design.looks] or [design.blocks]
    longest, rng = replace(design, blocks=last[-1]), np.random.default_rng([4, rows])
    stated = [
        answers(design, simulate_processes(rng, "clean", longest, rows))[0][0] for _ in range(60)
    ]
    effect = np.median([to_log_ratio(one.mde_pct) / one.sd for one in stated]) * SD
    moved = np.where(np.arange(rows) == 0, effect, 0.0)
    wide = replace(design, margin_pct=0.01)
    return rate(words[0] == "worse" for _, words in simulate(wide, rows, studies, moved, seed=5))


def grown_claim_rate(studies, ask=lambda done, shown: shown):
    """Return the share of A/A studies that claim anything at 4, 5 or 6 blocks."""
    rng, design, claims = (
        np.random.default_rng(6),
        Design(blocks=6, runs_per_block=2, margin_pct=0.01),
        0,
    )
    for _ in range(studies):
        values, shown, claimed = simulate_processes(rng, "clean", design, 1), [], False
        for done in (4, 5, 6):
            shown.append(done)
            _, words = answers(design, values[:, :done], shown=ask(done, shown))
            claimed |= bool({"better", "worse", "trivial"} & set(words))
        claims += claimed
    return claims / studies


QUICK = 150
STUDIES = 4_000


def print_figure(what, name, rows, share, kind=""):
    """Print a figure of the table in docs/statistical-methods.md (``pytest -m slow -s``)."""
    print(f"\n| {what} | {name} | {rows} | {kind} | {100 * share:.1f} % |")
    return share


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", DESIGNS)
def test_error_rates_and_power_of_every_design(name, rows):
    design = DESIGNS[name]
    wrong = print_figure("false word", name, rows, false_claim_rate(design, rows, STUDIES, "clean"))
    equal = print_figure(
        "false equivalent", name, rows, false_equivalence_rate(design, rows, STUDIES)
    )
    covered = print_figure("coverage", name, rows, coverage(design, rows, STUDIES, "clean"))
    detected = print_figure("power", name, rows, power(design, rows, STUDIES))
    printed = print_figure("as printed", name, rows, power_as_printed(design, rows, 1000))
    assert at_most(wrong, STUDIES) and at_most(equal, STUDIES) and at_most(1 - covered, STUDIES)
    assert 0.75 <= printed <= 0.90 and 0.75 <= detected <= 0.92


FEW = [(6, 1), (7, 1), (8, 1), (10, 1), (14, 1), (20, 1), (3, 2), (4, 2), (6, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("blocks", "runs"), FEW)
def test_power_of_designs_with_few_blocks(blocks, runs, rows):
    design = Design(blocks=blocks, runs_per_block=runs)
    detected = power_as_printed(design, rows, 1000)
    assert 0.75 <= print_figure("as printed", f"{blocks} x {runs}", rows, detected) <= 0.90


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", ["standard", "5 of 2"])
def test_error_rates_under_other_noise(name, kind):
    design, rows = DESIGNS[name], 3
    wrong = print_figure(
        "false word", name, rows, false_claim_rate(design, rows, STUDIES, kind), kind
    )
    covered = print_figure("coverage", name, rows, coverage(design, rows, STUDIES, kind), kind)
    assert at_most(wrong, STUDIES) and at_most(1 - covered, STUDIES)


def reference_residuals(folder):
    """Return the log differences of the committed study's arm and baseline, less their means.

    float64 [processes, rows], of the processes that measured all rows: a look decided some.
    """
    unpack_archive(REFERENCE, folder)
    (cell,) = folder.glob("*/cell.json")
    analysis = analyse(cell.parent)
    baseline, arm = (one.name for one in analysis.data.arms[:2])
    rows = [row for row in analysis.rows if row.primary and row.skipped is None]
    blocks = sorted(set.intersection(*(set(row.by_block(baseline)) for row in rows)))
    pairs = [[log_values(row, name, blocks)[:, 0] for name in (baseline, arm)] for row in rows]
    differences = np.diff(pairs, axis=1)[:, 0].T
    return differences - differences.mean(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("moved", ["no row", "one row", "all rows"])
def test_error_rates_with_the_noise_of_the_committed_study(moved, tmp_path):
    residuals, studies = reference_residuals(tmp_path / "study"), 2_000
    rng, (processes, rows) = np.random.default_rng(10), residuals.shape
    design = Design(blocks=processes, runs_per_block=1, margin_pct=0.01)
    mixed = residuals / math.sqrt(processes - 1)

    def values():
        noise = rng.normal(size=(processes, processes)) @ mixed
        return np.stack([np.zeros_like(noise), noise])[:, :, None]

    found = [answers(design, values())[0] for _ in range(studies)]
    lows = np.array([[to_log_ratio(one.ci_pct[0]) for one in each] for each in found])
    printed = np.array([[to_log_ratio(one.mde_pct) for one in each] for each in found])
    if moved == "no row":
        false = rate(any(one.p_adjusted <= 0.05 for one in each) for each in found)
        assert at_most(print_figure("false claim", "reference", rows, false), studies)
    else:
        shown = slice(1) if moved == "one row" else slice(None)
        detected = rate(
            (printed[other, shown] + low[shown] > 0).mean()
            for low, other in zip(lows, rng.permutation(studies), strict=True)
        )
        print_figure(f"power, {moved}", "reference", rows, detected)
        assert 0.75 <= detected <= 0.9


@pytest.mark.slow
def test_error_rate_of_growing_studies():
    assert at_most(print_figure("grown 4, 5, 6", "standard", 1, grown_claim_rate(STUDIES)), STUDIES)
    unnoticed = grown_claim_rate(STUDIES, ask=lambda done, shown: [done])
    print_figure("grown, unnoticed", "standard", 1, unnoticed)


@pytest.mark.parametrize("rows", QUICK_ROWS)
@pytest.mark.parametrize("name", ["standard", "5 of 2"])
def test_equal_arms_are_seldom_called_different(name, rows):
    assert at_most(false_claim_rate(DESIGNS[name], rows, QUICK, "clean"), QUICK)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["standard", "5 of 2"])
def test_arms_that_differ_by_the_margin_are_seldom_called_equivalent(name, rows):
    assert at_most(false_equivalence_rate(DESIGNS[name], rows, QUICK), QUICK)


@pytest.mark.parametrize("rows", QUICK_ROWS)
@pytest.mark.parametrize("name", ["standard", "5 of 2"])
def test_all_shown_intervals_cover_the_truth_jointly(name, rows):
    assert at_most(1 - coverage(DESIGNS[name], rows, QUICK, "clean"), QUICK)


@pytest.mark.parametrize("rows", QUICK_ROWS)
@pytest.mark.parametrize("name", ["standard", "5 of 2"])
def test_the_smallest_detectable_effect_is_detected_as_often_as_stated(name, rows):
    assert 0.68 <= power(DESIGNS[name], rows, 2 * QUICK) <= 0.95


@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize(("blocks", "runs"), [(6, 1), (8, 1), (3, 2)])
def test_the_printed_figure_has_its_power_with_few_blocks(blocks, runs, rows):
    """Noise taken as known and the level of an infinite study would give .50 to .72."""
    design = Design(blocks=blocks, runs_per_block=runs)
    assert 0.73 <= power_as_printed(design, rows, 300) <= 0.87


@pytest.mark.parametrize(("blocks", "runs"), [(6, 1), (7, 1), (8, 1), (10, 1), (3, 2), (4, 2)])
def test_a_forecast_from_noise_of_five_processes_has_its_power(blocks, runs):
    rng = np.random.default_rng([9, blocks, runs])
    criteria = DecisionCriteria(runs, 0.05, MARGIN)
    design = Design(blocks=blocks, runs_per_block=runs)
    studies = [as_rows(simulate_processes(rng, "clean", design, 1)) for _ in range(300)]
    found = [compare_arm(rows, "arm", "base", criteria)[0].ci_pct[0] for rows in studies]
    noise = SD * np.sqrt(rng.chisquare(4, 1000) / 4)
    forecasts = [single_row_mde_pct(sd, blocks, runs, 0.05, sd_df=4) for sd in noise]
    lows = np.array([[to_log_ratio(low)] for low in found])
    assert 0.73 <= np.mean(lows + [to_log_ratio(each) for each in forecasts] > 0) <= 0.87


@pytest.mark.slow
def test_a_study_that_grows_after_it_was_shown_keeps_its_error_rate():
    studies = 600
    assert at_most(grown_claim_rate(studies), studies)
    unnoticed = grown_claim_rate(studies, ask=lambda done, shown: [done])
    assert not at_most(unnoticed, studies)  # 9.5 % where nobody writes down what was shown


def test_arms_of_a_cell_share_alpha():
    """The family of five equal arms is rows times arms."""
    rng, studies = np.random.default_rng(7), 150
    design, claims = DESIGNS["standard"], {1: 0, 5: 0}
    for _ in range(studies):
        base = simulate_processes(rng, "clean", design, 2)[0]
        arms = [np.stack([base, simulate_processes(rng, "clean", design, 2)[1]]) for _ in range(5)]
        for times in claims:
            words = {w for arm in arms for w in answers(design, arm, arms=times)[1]}
            claims[times] += bool({"better", "worse", "trivial"} & words)
    assert at_most(claims[5] / studies, studies) and not at_most(claims[1] / studies, studies)
