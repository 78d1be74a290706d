"""Replications: rows that an earlier look decided, and rows that no test decides."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.document.chart import Dots
from labkit.analysis.model.replication_result import MeasuredEffect, ReplicatedRow
from labkit.analysis.pages.replication_page import _medians, _picture
from labkit.analysis.studies import replication
from labkit.analysis.studies.replication import NO_RATIO, replication_of
from labkit.records import Metric

LOOKS = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]


@pytest.mark.usefixtures("fewer_pairs")
@pytest.mark.parametrize(("stopped", "alpha"), [((), 0.04), (("prefill, 8 × 512",), 0.01)])
def test_a_row_that_an_earlier_look_decided_spends_that_look_s_alpha(
    make_cell, stopped, alpha, monkeypatch
):
    taken = {"blocks": 4, "alpha": 0.01, "decided": False, "stopped": stopped}
    path = make_cell(blocks=8, looks=LOOKS, design={"looks_taken": [taken]})
    study = path.parent, [analyse(path)]
    page = replication.replication_of(study, study)
    assert page.alpha == alpha and page.counts == {"replicated": 2}
    levels = []
    monkeypatch.setattr(
        replication, "times_as_long", lambda *args, **_: levels.append(args[3]) or 1.0
    )
    assert len(list(replication.forecast_lines(study[1]))) == 2
    assert levels == [alpha / 2] * 2


def test_nothing_is_decided_from_a_word_that_the_reader_s_study_withheld(make_cell):
    """Its interval alone would decide the row."""
    author, reader = analyse(make_cell("a/cell")), analyse(make_cell("b/cell"))
    pair = next(replication._pairs([author], [reader]))
    assert pair.reason is None and pair.other.verdict == "better"
    withheld = replace(pair.other, verdict="inconclusive", reason="noise exceeds margin")
    row = replace(pair.here, comparisons=(withheld,))
    assert replace(pair, here=row).reason == "noise exceeds margin"


WASTE, LEFT = ("kv_waste_pct", "%", "lower"), ("left_pct", "% of RAM", "higher")
GOODPUT = ("goodput_req_s", "req/s", "higher")
OTHER = "same direction, other size"


@pytest.fixture
def pair(make_cell):
    """Return a function that returns the only row of a replication, by (baseline, arm) values."""
    numbers = count()

    def replicated(metric, *sides):
        def measuring(base, own):
            def change(record):
                value = own if record.arm == "seq_map" else base
                metrics = () if value is None else (Metric(*metric, True, (value,)),)
                cases = tuple(replace(case, metrics=metrics) for case in record.cases)
                return replace(record, cases=cases)

            return change

        studies = [
            make_cell(f"{next(numbers)}/cell", blocks=8, cases=("one",), change=measuring(*side))
            for side in sides
        ]
        author, reader = ((path.parent, [analyse(path)]) for path in studies)
        (row,) = replication_of(author, reader).rows
        return row.verdict, row.reason

    return replicated


@pytest.mark.parametrize(
    ("metric", "author", "reader", "word"),
    [
        (WASTE, (0.0, 30.0), (0.0, 30.2), "replicated"),
        (WASTE, (0.0, 30.0), (0.0, 20.0), OTHER),
        (WASTE, (0.0, 30.0), (30.0, 0.0), "not replicated"),
        (WASTE, (0.0, 0.0), (0.0, 0.0), "replicated"),
        (WASTE, (0.0, 0.0), (0.0, 1.0), "not replicated"),
        (WASTE, (40.0, 0.0), (30.0, 0.0), "replicated"),  # all of it is saved
        (WASTE, (40.0, 0.0), (30.0, 20.0), OTHER),
        (WASTE, (40.0, 20.0), (30.0, 15.1), "replicated"),
        (LEFT, (-5.0, 30.0), (-5.1, 30.0), "replicated"),
        (LEFT, (-5.0, 30.0), (-5.0, -9.0), "not replicated"),
    ],
)
def test_computed_values_without_a_ratio_are_compared_too(pair, metric, author, reader, word):
    """They were "no claim", whatever the reader had."""
    assert pair(metric, author, reader) == (word, None)


def test_a_computed_value_that_one_study_lacks(pair):
    assert pair(WASTE, (None, 3.0), (2.0, 3.0)) == ("no claim", None)
    assert pair(WASTE, (2.0, 3.0), (None, 3.0)) == ("not decided", "not measured here")


def test_an_effect_from_0_is_a_claim_that_no_ratio_decides(pair):
    assert pair(GOODPUT, (0.0, 4.0), (0.0, 4.0)) == ("not decided", NO_RATIO)
    assert pair(GOODPUT, (4.0, 0.0), (4.0, 2.0)) == ("not decided", NO_RATIO)


def test_why_a_row_was_not_measured_is_said(make_cell):
    skipped = {"prefill, 8 × 512": "its KV pool is too large"}
    author, reader = make_cell("a/cell"), make_cell("b/cell", skipped=skipped)
    sides = [(path.parent, [analyse(path)]) for path in (author, reader)]
    reasons = {row.case: row.reason for row in replication_of(*sides).rows}
    assert reasons["prefill, 8 × 512"] == "not measured here: its KV pool is too large"


def test_medians_have_their_unit():
    """Bytes were converted to MiB, and no text said so."""
    author = MeasuredEffect(baseline_median=12 << 20, median=6 << 20)
    row = ReplicatedRow("c", "all", "peak_kv_bytes", "bytes", "map", author, MeasuredEffect(), "")
    assert [_medians(row, side) for side in (row.author, row.reader)] == ["12.00 → 6.00 MiB", "–"]


def test_a_metric_in_another_unit_replicates_nothing(make_cell):
    def change(record):
        cases = (
            replace(case, metrics=tuple(replace(m, unit="ms") for m in case.metrics))
            for case in record.cases
        )
        return replace(record, cases=tuple(cases))

    author, reader = make_cell("a/cell"), make_cell("b/cell", change=change)
    page = replication_of(*((path.parent, [analyse(path)]) for path in (author, reader)))
    assert {(row.verdict, row.reason) for row in page.rows} == {
        ("not decided", "measured in ms here (lower is better)")
    }


def test_an_effect_of_a_replication_that_rounds_to_0_has_no_sign():
    effects = (MeasuredEffect(effect_pct=pct, verdict="equivalent") for pct in (-0.001, 12.34))
    row = ReplicatedRow("c", "all", "x", "us", "map", *effects, "replicated")
    page = SimpleNamespace(rows=[row], name_of=lambda row: row.case)
    tips = [tip for mark in _picture(page).marks if isinstance(mark, Dots) for tip in mark.tips]
    texts = [tip.partition(": ")[2] for tip in tips]
    assert texts == ["0.00% (equivalent)", "+12.3% (equivalent)"]
