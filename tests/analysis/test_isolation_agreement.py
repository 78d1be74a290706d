"""Agreement of interleaved arms with separate processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.analysis.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.cell_analysis import CellData, analyse
from labkit.analysis.isolation_agreement import agreement_sentence, compare_isolations
from labkit.analysis.observations import MetricRow, RunValue


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
    arms = [SimpleNamespace(name="base", role="baseline"), SimpleNamespace(name="arm", role="arm")]
    return SimpleNamespace(
        rows=[row],
        comparisons=[{"arm": comparison}],
        data=CellData(Path("cell"), {}, tuple(arms), ()),
    )


def simulated_agreements(effect, other, studies):
    rng = np.random.default_rng(5)
    for _ in range(studies):
        turns = simulated_row(rng, effect, 0.01, 10, 1)
        (agreement,) = compare_isolations(turns, simulated_row(rng, other, 0.05, 4, 2))
        yield agreement


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
    agreements = compare_isolations(analyse(turns), analyse(apart))
    assert [(a.case, a.arm) for a in agreements] == [
        ("decode, 64 reqs, ctx 128", "seq_map"),
        ("prefill, 8 × 512", "seq_map"),
    ]
    assert all(abs(a.interleaved_pct + 10) < 1 for a in agreements)
    assert agreement_sentence(agreements).startswith(says)


def test_too_few_blocks_neither_agree_nor_disagree(make_cell):
    turns = make_cell("cell", blocks=10, runs=1)
    apart = make_cell("cell~", blocks=1)
    agreements = compare_isolations(analyse(turns), analyse(apart))
    assert [a.agrees for a in agreements] == [None, None]
    assert "too few blocks" in agreement_sentence(agreements)


def test_both_cells_reports_have_the_agreement_and_no_isolation_caveat(make_cell):
    from labkit.analysis import write_study
    from labkit.analysis.caveats import caveats
    from labkit.analysis.isolation_agreement import isolation_sentence
    from labkit.analysis.study_analysis import AnalysisCache

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
