"""The settings of a sweep: which rows count for the answer."""

from dataclasses import replace
from types import SimpleNamespace

from labkit.analysis.comparison.arm_comparison import OUT_OF_REACH
from labkit.analysis.comparison.best_setting import is_decided
from labkit.analysis.findings import verdict_sentences
from labkit.analysis.model.cell_model import BestInRow

DECIDED = BestInRow("light", "us", "us", "lower", best="a", possibly_best=("a",))


def test_a_row_that_is_out_of_reach_keeps_no_sweep_from_its_answer():
    heavy = replace(DECIDED, case="heavy", possibly_best=(), withheld=OUT_OF_REACH)
    assert is_decided([heavy, DECIDED]) and not is_decided([heavy])
    assert not is_decided([DECIDED, replace(DECIDED, possibly_best=("a", "b"))])
    summary = verdict_sentences._of_sweep(SimpleNamespace(best=(heavy, DECIDED)))
    assert summary.text == "best setting known"
