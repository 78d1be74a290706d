"""Differences within blocks: known answers, and the sentence that compares them with the runs."""

import pytest

from labkit.analysis.charts.run_and_effect_charts import paired_differences, variation_sentence
from labkit.analysis.comparison.observations import MetricRow, RunValue


def row(base, other, **options):
    """Return a row of arms ``base`` and ``map``; values by block."""
    made = MetricRow("a", "dispatch_us", "us", "lower", True, **options)
    for arm, blocks in (("base", base), ("map", other)):
        made.arms[arm] = [
            RunValue(block, position, f"runs/b{block}-{position}-{arm}.json", value)
            for block, values in enumerate(blocks)
            for position, value in enumerate(values)
        ]
    return made


def test_a_difference_is_that_of_the_means_of_logs_within_a_block():
    made = row([[100, 400], [50, 50]], [[220, 220], [40, 40]])
    pairs = paired_differences(made, "map", "base", 2)
    assert pairs == pytest.approx({0: 10.0, 1: -20.0})


def test_an_incomplete_block_has_no_difference():
    pairs = paired_differences(row([[100], [100], [100]], [[90], [], [80]]), "map", "base", 1)
    assert pairs == pytest.approx({0: -10.0, 2: -20.0})
    assert paired_differences(row([[100]], [[]]), "map", "base", 1) == {}


def test_rows_that_were_skipped_or_are_not_positive_have_none():
    assert paired_differences(row([[1]], [[2]], skipped="too large"), "map", "base", 1) == {}
    assert paired_differences(row([[0]], [[2]]), "map", "base", 1) == {}


def test_the_sentence_compares_the_range_of_runs_with_that_of_differences():
    made = row([[100], [200]], [[110], [230]])
    pairs = paired_differences(made, "map", "base", 1)
    assert variation_sentence(made, "base", "map", pairs.values()) == (
        "runs of base lie up to 100 % apart, the differences of map within blocks 5.0 points"
    )
    single = row([[100]], [[110]])
    one = paired_differences(single, "map", "base", 1)
    assert variation_sentence(single, "base", "map", one.values()) is None
