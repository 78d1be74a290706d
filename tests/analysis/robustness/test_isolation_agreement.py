"""Agreement of interleaved arms with separate processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.analysis.comparison.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.comparison.cell_analysis import CellData, analyse
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.model.result_row import Comparison
from labkit.analysis.number_format import bound_text
from labkit.analysis.robustness.isolation_agreement import (
    isolation_agreements,
    isolation_sentence,
)
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.records import PROCESSES_SUFFIX

DATA = CellData(
    Path("cell"), {"design": {}},
    (SimpleNamespace(name="base", role="baseline"), SimpleNamespace(name="arm", role="arm")), (),
)  # fmt: skip


def paired(interleaved, separate):
    """Return a cell that interleaves arms, and whose companion has separate processes."""
    interleaved.companion = lambda: separate
    return interleaved


def simulated_row(rng, effect, noise, blocks, runs):
    """Simulate one row: a baseline, and an arm that is larger by ``effect`` (log scale)."""
    row = MetricRow("one", "dispatch_us", "us", "lower", True)
    for arm, shift in (("base", 0.0), ("arm", effect)):
        row.arms[arm] = [
            RunValue(block, run, f"{arm}{block}{run}", float(np.exp(shift + rng.normal(0, noise))))
            for block in range(blocks)
            for run in range(runs)
        ]
    criteria = DecisionCriteria(runs, 0.05, 2.0)
    (comparison,) = compare_arm([row], "arm", "base", criteria)
    return SimpleNamespace(rows=[row], comparisons=[{"arm": comparison}], data=DATA, environment={})


def simulated_agreements(effect, other, studies):
    rng = np.random.default_rng(5)
    for _ in range(studies):
        turns = simulated_row(rng, effect, 0.01, 10, 1)
        (agreement,) = isolation_agreements(paired(turns, simulated_row(rng, other, 0.05, 4, 2)))
        yield agreement


def estimated(*rows):
    """Return a cell of given estimates: (case, primary, effect, low and high limit), in percent."""
    return SimpleNamespace(
        rows=[MetricRow(case, "dispatch_us", "us", "lower", primary) for case, primary, *_ in rows],
        comparisons=[
            {"arm": Comparison("arm", "base", effect, low, high)} for *_, effect, low, high in rows
        ],
        data=DATA,
        environment={},
    )


LARGE, SMALL = ("one", True, 10.0, 7.0, 18.0), ("one", True, 4.0, 3.0, 9.0)


def apart_by(*percents):
    """Return the root of the sum of squared log ratios of pairs, in percent."""
    logs = [np.log1p(high / 100) - np.log1p(low / 100) for low, high in percents]
    return 100 * np.expm1(np.hypot(*logs))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("low", "high", "agrees"), [(7.0, 18.0, False), (2.0, 11.0, True)])
def test_what_went_undetected_follows_from_the_limits_that_face_each_other(
    swapped, low, high, agrees
):
    """From the lower limit of the larger effect and the upper limit of the smaller."""
    cells = (estimated(("one", True, 10.0, low, high)), estimated(SMALL))
    (agreement,) = isolation_agreements(paired(*(cells[::-1] if swapped else cells)))
    assert agreement.undetected_pct == pytest.approx(apart_by((low, 10), (4, 9)))
    difference = 100 * (1.10 / 1.04 - 1)
    assert agreement.difference_pct == pytest.approx(-difference if swapped else difference)
    assert agreement.agrees is agrees
    effects = agreement.interleaved_pct, agreement.separate_pct
    assert effects == ((4.0, 10.0) if swapped else (10.0, 4.0))


def test_only_primary_rows_of_both_cells_are_compared():
    secondary = ("one", False, 50.0, 49.0, 51.0)
    one = estimated(LARGE, secondary, ("alone", True, 1.0, 0.0, 2.0))
    (agreement,) = isolation_agreements(paired(one, estimated(SMALL, secondary)))
    assert (agreement.interleaved_pct, agreement.separate_pct) == (10.0, 4.0)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_row_without_an_effect_or_an_interval_in_either_cell(swapped):
    nothing = ("one", True, -100.0, -100.0, -98.0)  # of a baseline's goodput; it has no log ratio
    unknown, pointwise = ("one", True, None, None, None), ("one", True, 4.0, None, None)
    for other in (unknown, pointwise, nothing):
        cells = (estimated(LARGE), estimated(other))
        agreements = isolation_agreements(paired(*(cells[::-1] if swapped else cells)))
        assert [(a.difference_pct, a.agrees) for a in agreements] == (
            [(None, None)] if other is pointwise else []
        )


@pytest.mark.parametrize("lost", [(-100.0, -100.0, -80.0), (-70.0, -100.0, -40.0)])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_arm_that_lost_all_of_its_goodput_has_no_ratio_to_compare(lost, swapped):
    cells = (estimated(("one", True, *lost)), estimated(SMALL))
    pair = paired(*(cells[::-1] if swapped else cells))
    assert isolation_agreements(pair) == []
    assert "no effect can be compared" in isolation_sentence(pair)


def test_the_sentence_states_the_coarsest_row_or_the_clearest_disagreement():
    narrow, wide = ("a", True, 1.0, 0.0, 2.0), ("b", True, 1.0, -2.0, 4.0)
    bounds = [apart_by((1, 2), (0, 1)), apart_by((1, 4), (-2, 1))]
    assert isolation_sentence(paired(estimated(narrow, wide), estimated(narrow, wide))) == (
        "Separate processes agree with interleaved runs in all 2 rows "
        f"(a difference below {bound_text(bounds[1])} % could have gone undetected in some row)."
    )
    only = isolation_sentence(paired(estimated(narrow), estimated(narrow)))
    assert f"in the only row (a difference below {bound_text(bounds[0])} %" in only
    large, clear = ("large", True, 6.0, 2.5, 9.5), ("clear", True, -4.0, -4.7, -3.3)
    none = ("large", True, 0.0, -3.5, 3.5), ("clear", True, 0.0, -0.7, 0.7)
    cells = estimated(large, clear, narrow, wide), estimated(*none, narrow, wide)
    assert isolation_sentence(paired(*cells)) == (
        "Separate processes disagree with interleaved runs in 2 of 4 rows, most in clear: "
        "arm −4.0% interleaved, 0.0% in separate processes."
    )


def test_a_row_of_all_requests_is_named_by_its_metric():
    cells = (estimated(("all", True, effect, effect - 1, effect + 1)) for effect in (-4.0, 4.0))
    assert "in 1 of 1 rows, most in dispatch_us: arm" in isolation_sentence(paired(*cells))


def test_both_cells_of_a_pair_report_the_same_difference(make_cell):
    turns = make_cell("s/cell", blocks=10, runs=1, effects={"seq_map": 0.9}, isolation="in_process")
    apart = make_cell(f"s/cell{PROCESSES_SUFFIX}", seed=2, effects={"seq_map": 1.2})
    cache = AnalysisCache()
    agreements = [isolation_agreements(cache.cell(path)) for path in (turns, apart)]
    assert agreements[0] == agreements[1] and len(agreements[0]) == 2
    assert all(a.interleaved_pct < 0 < a.separate_pct for a in agreements[0])


def test_designs_with_equal_effects_seldom_disagree():
    apart = [not agreement.agrees for agreement in simulated_agreements(0.1, 0.1, 400)]
    assert np.mean(apart) <= 0.06


def test_designs_with_different_effects_disagree():
    apart = [not agreement.agrees for agreement in simulated_agreements(0.1, 0.3, 50)]
    assert np.mean(apart) >= 0.9
    first = next(simulated_agreements(0.1, 0.3, 1))
    assert first.difference_pct < 0 < first.undetected_pct < abs(first.difference_pct)


@pytest.mark.parametrize(
    ("effect", "says"),
    [
        (0.90, "Separate processes agree with interleaved runs in all 2 rows"),
        (1.10, "Separate processes disagree with interleaved runs in 2 of 2 rows, most in"),
    ],
)
def test_interleaved_and_separate_cells_of_a_study_are_compared(make_cell, effect, says):
    turns = make_cell("cell", blocks=10, runs=1, effects={"seq_map": 0.9})
    apart = make_cell("cell~", seed=2, effects={"seq_map": effect})
    both = analyse(turns, lambda: analyse(apart))
    agreements = isolation_agreements(both)
    assert [(a.row, a.arm) for a in agreements] == [
        ("decode, 64 reqs, ctx 128", "seq_map"),
        ("prefill, 8 × 512", "seq_map"),
    ]
    assert all(abs(a.interleaved_pct + 10) < 1 for a in agreements)
    assert isolation_sentence(both).startswith(says)


def test_too_few_blocks_neither_agree_nor_disagree(make_cell):
    turns = make_cell("cell", blocks=10, runs=1)
    apart = make_cell("cell~", blocks=1)
    both = analyse(turns, lambda: analyse(apart))
    assert [a.agrees for a in isolation_agreements(both)] == [None, None]
    assert "too few blocks" in isolation_sentence(both)


def test_both_cells_reports_have_the_agreement_and_no_isolation_caveat(make_cell):
    from planted_cells import caveats

    from labkit.analysis import write_study

    turns = make_cell("s/cell", blocks=10, runs=1, effects={"seq_map": 0.9}, isolation="in_process")
    alone = analyse(turns)
    assert isolation_sentence(alone) is None
    assert any("all arms were interleaved in one process" in line for line in caveats(alone))
    apart = make_cell("s/cell~processes", seed=2, effects={"seq_map": 0.9})
    write_study(turns.parent, plots=False)
    for folder in (turns, apart):
        assert isolation_sentence(AnalysisCache().cell(folder)).startswith(
            "Separate processes agree"
        )
    assert not any(
        "all arms were interleaved in one process" in line
        for line in caveats(AnalysisCache().cell(turns))
    )
    for name in ("report.md", "report.html"):
        text = (turns.parent / name).read_text()
        assert text.count("Separate processes agree with interleaved runs in all 2 rows") == 2
