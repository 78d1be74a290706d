"""The blocks that an order of runs allows."""

from dataclasses import replace
from pathlib import Path

import pytest

from labkit.importers.exchangeable_blocks import Order, plan_runs
from labkit.importers.imported_run import ImportedRun, ResultFileError, metric
from labkit.records import CaseRecord


def runs_of(text, timed=True, files=None):
    """Return a run for each letter, the name of its arm, in the order of time."""
    return [
        ImportedRun(
            "tool" if timed else "CSV",
            Path(files[place] if files else str(place)),
            (CaseRecord("all", metrics=(metric("x", [1.0 + place], "s"),)),),
            started=float(place) if timed else None,
            arm=arm,
        )
        for place, arm in enumerate(text)
    ]


def shape(plan):
    return plan.order, plan.runs_per_block, ["".join(r.arm for r in b) for b in plan.blocks]


@pytest.mark.parametrize(
    ("text", "order", "runs", "blocks"),
    [
        ("abbaab", Order.in_turns, 1, ["ab", "ba", "ab"]),
        ("abbabbaa", Order.in_turns, 2, ["abba", "bbaa"]),
        ("aabbbbaa", Order.in_turns, 1, ["ab", "ba"]),  # runs that came together count as one
        ("aaabbb", Order.one_after_the_other, 3, ["aaabbb"]),
        ("aaabbbb", Order.one_after_the_other, 3, ["aaabbb"]),
        ("aababb", Order.mixed, 3, ["aababb"]),
        ("abccba", Order.in_turns, 1, ["abc", "cba"]),
        ("ababab", Order.same_turns, 1, ["ab", "ab", "ab"]),  # a drift does not cancel
        ("abcabc", Order.same_turns, 1, ["abc", "abc"]),
        ("aabbaabb", Order.same_turns, 1, ["ab", "ab"]),
        ("abbaabba", Order.in_turns, 1, ["ab", "ba", "ab", "ba"]),
    ],
)
def test_windows_hold_every_arm_equally_often(text, order, runs, blocks):
    arms = sorted(set(text))
    assert shape(plan_runs(arms, runs_of(text))) == (order, runs, blocks)
    table = runs_of(text, files="1" * len(text))  # all runs are in one file
    assert shape(plan_runs(arms, table)) == (order, runs, blocks)


def test_processes_of_one_file_are_repeats_if_files_came_in_turns():
    plan = plan_runs("ab", runs_of("aabbbaab", files="11222334"))
    assert shape(plan) == (Order.same_turns, 1, ["ab", "ab"])
    assert plan.blocks[0][1].cases[0].metrics[0].repeats == (3.0, 4.0, 5.0)
    assert "runs of an arm that came together count as one" in plan.notes[-1]


def test_an_unknown_order_is_the_weakest():
    plan = plan_runs("ab", runs_of("ababab", timed=False))
    assert plan.order is Order.unknown and plan.order.weak and plan.runs_per_block == 3


def test_blocks_must_hold_every_arm_equally_often():
    runs = runs_of("abab")
    named = [ImportedRun(**{**vars(run), "block": str(i // 2)}) for i, run in enumerate(runs)]
    assert shape(plan_runs("ab", named)) == (Order.blocks, 1, ["ab", "ab"])
    for wrong, line in ((named[:3], "each arm equally often"), ([*named, runs[0]], "have none")):
        with pytest.raises(ResultFileError, match=line):
            plan_runs("ab", wrong)


def test_arms_that_have_one_time_have_no_known_order(tmp_path):
    """In one file, the order of its lines counted, whatever their times."""
    table = [replace(run, started=0.0) for run in runs_of("abab", files="1111")]
    plan = plan_runs("ab", table)
    assert plan.order is Order.unknown
    assert plan.notes == ("runs of a in 1 and b in 1 have the same time",)
    (tmp_path / "1").touch()  # a file of a tool that writes its runs in their order
    written = [replace(run, started=None, file=tmp_path / "1") for run in table]
    assert plan_runs("ab", written).order is Order.same_turns
