"""The order of imported runs: the blocks of the permutation test that it allows.

The runs are sorted by time and cut into windows that hold every arm equally often. Inside a window,
the labels of the runs are exchangeable if nothing but the arm changed, which a short window makes
likely. One window that holds all runs of one arm before those of the other is the weakest order: a
drift of the machine looks like an effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path

from labkit.config import count_text
from labkit.importers.imported_run import ImportedRun, ResultFileError
from labkit.records import CaseRecord, Metric


class Order(Enum):
    """The order in which the arms ran; the value is a sentence about it."""

    blocks = "the file names the blocks; whether the order within them was random is not known"
    in_turns = "the arms ran in turns; whether their order was random is not known"
    same_turns = (
        "the arms ran in turns, always in the same order: a steady drift of the machine does not "
        "cancel, and its step from one run to the next would look like an effect; change the order "
        "from turn to turn, as in B A A B"
    )
    mixed = "the runs of the arms were mixed, but not in blocks: the test assumes a random order"
    one_after_the_other = (
        "the arms ran one after the other: the test assumes that nothing drifted in between, and a "
        "machine that became slower or faster would look like an effect; run them in turns"
    )
    unknown = (
        "the order of the runs is not known: the test assumes that nothing drifted between the "
        "arms; add times or blocks"
    )

    @property
    def weak(self) -> bool:
        """Whether a drift of the machine would look like an effect."""
        return self in (Order.one_after_the_other, Order.unknown)


@dataclass(frozen=True)
class RunPlan:
    """The runs in blocks, each in the order in which they ran.

    ``notes``: how that was found. ``failed``: a line for each run that is in no block, because its
    arm has more than another, and that failed.
    """

    order: Order
    blocks: tuple[tuple[ImportedRun, ...], ...]
    runs_per_block: int
    notes: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def plan_runs(arms: Sequence[str], runs: Sequence[ImportedRun]) -> RunPlan:
    """Return the runs of the arms in blocks.

    Raises ``ResultFileError`` if some runs name a block and others do not, or a block does not hold
    every arm equally often.
    """
    if any(run.block is not None for run in runs):
        return _named_blocks(arms, runs)
    times, notes = _times(runs)
    if times is None:
        return _one_block(arms, runs, notes)
    in_order = [runs[i] for i in sorted(range(len(runs)), key=lambda i: (times[i], i))]
    plan = _in_windows(arms, _joined_by_file(in_order))
    if plan is not None and all(len(_groups(block)) == len(arms) for block in plan.blocks):
        # Each arm's runs came together in every window, so they are no runs in turns.
        joined = tuple(tuple(map(_as_one_run, _groups(block))) for block in plan.blocks)
        plan = RunPlan(Order.in_turns, joined, 1)
    if plan is not None:
        orders = {tuple(run.arm for run in block) for block in plan.blocks}
        plan = replace(plan, order=Order.same_turns) if len(orders) == 1 else plan
        joined_runs = sum(map(len, plan.blocks)) < len(runs)
        joining = ("runs of an arm that came together count as one",) if joined_runs else ()
        return replace(plan, notes=(*notes, *joining))
    plan = _one_block(arms, in_order, notes)
    together = len(_groups(plan.blocks[0])) == len(arms)
    return replace(plan, order=Order.one_after_the_other if together else Order.mixed)


def _named_blocks(arms: Sequence[str], runs: Sequence[ImportedRun]) -> RunPlan:
    blocks: dict[str, list[ImportedRun]] = {}
    for run in runs:
        if run.block is None:
            raise ResultFileError(f"{run.file}: some runs have a block and others have none")
        blocks.setdefault(run.block, []).append(run)
    counts = {_count(own, arm) for own in blocks.values() for arm in arms}
    if len(counts) > 1:
        raise ResultFileError(f"{runs[0].file}: every block must have each arm equally often")
    return RunPlan(Order.blocks, tuple(map(tuple, blocks.values())), counts.pop())


def _times(runs: Sequence[ImportedRun]) -> tuple[list[float] | None, tuple[str, ...]]:
    """Return the start of every run, and where it is from; None if it cannot be known.

    Without times in the files, it is the time when a file was last written.
    """
    in_files = all(run.started is not None for run in runs)
    if in_files:
        times = [float(run.started or 0.0) for run in runs]
        source = "the times in the files give the order of the runs"
    elif all(run.tool == "CSV" for run in runs):
        return None, ()
    else:
        written: dict[Path, float] = {run.file: run.file.stat().st_mtime for run in runs}
        times = [written[run.file] for run in runs]
        source = "the times when the files were last written give the order of the runs"
    first: dict[float, ImportedRun] = {}
    for run, time in zip(runs, times, strict=True):
        other = first.setdefault(time, run)
        if run.arm != other.arm and (in_files or run.file != other.file):
            named = (f"{one.arm} in {one.file}" for one in (other, run))
            return None, (f"runs of {' and '.join(named)} have the same time",)
    return times, (source,)


def _in_windows(arms: Sequence[str], runs: Sequence[ImportedRun]) -> RunPlan | None:
    """Return the plan of the shortest windows that hold every arm equally often, at least two."""
    for per_arm in range(1, len(runs) // (2 * len(arms)) + 1):
        size = per_arm * len(arms)
        windows = [tuple(runs[i : i + size]) for i in range(0, len(runs), size)]
        if all(_count(window, arm) == per_arm for window in windows for arm in arms):
            return RunPlan(Order.in_turns, tuple(windows), per_arm)
    return None


def _count(runs: Sequence[ImportedRun], arm: str) -> int:
    return sum(run.arm == arm for run in runs)


def _groups(runs: Sequence[ImportedRun]) -> list[list[ImportedRun]]:
    """Return the runs in groups of one arm that came together."""
    return [list(group) for _, group in groupby(runs, lambda run: run.arm)]


def _joined_by_file(runs: Sequence[ImportedRun]) -> list[ImportedRun]:
    """Return the runs, those of one file as one if their arm has several files of its own."""
    pairs = {(run.file, run.arm) for run in runs}
    shared = {file for file, _ in pairs if sum(file == other for other, _ in pairs) > 1}
    files = Counter(arm for file, arm in pairs if file not in shared)
    groups = groupby(runs, lambda run: run.file if files[run.arm] > 1 else id(run))
    return [_as_one_run(list(group)) for _, group in groups]


def _as_one_run(runs: Sequence[ImportedRun]) -> ImportedRun:
    """Return runs that came together as one run, whose repeats they are."""
    cases: dict[str, dict[str, list[Metric]]] = {}
    for run in runs:
        for case in run.cases:
            for one in case.metrics:
                cases.setdefault(case.case, {}).setdefault(one.name, []).append(one)
    joined = []
    for name, by_name in cases.items():
        repeats = {key: tuple(x for m in own for x in m.repeats) for key, own in by_name.items()}
        metrics = (replace(own[0], repeats=repeats[key]) for key, own in by_name.items())
        joined.append(CaseRecord(name, metrics=tuple(metrics)))
    failure = next((run.failure for run in runs if run.failure), None)
    return replace(runs[0], cases=tuple(joined), failure=failure)


def _one_block(arms: Sequence[str], runs: Sequence[ImportedRun], notes: tuple[str, ...]) -> RunPlan:
    """Return the plan of one block: equally many runs of every arm, the first ones."""
    fewest = min(_count(runs, arm) for arm in arms)
    first = {id(r) for arm in arms for r in [r for r in runs if r.arm == arm][:fewest]}
    kept = tuple(run for run in runs if id(run) in first)
    more = [run for run in runs if id(run) not in first]
    if more:
        left_out = f"{count_text(len(more), 'run')} left out: the arms do not have equally many"
        notes = (*notes, left_out)
    failed = dict.fromkeys(
        f"a run of {run.arm} that failed is left out: {run.file.name}: {run.failure}"
        for run in more
        if run.failure
    )
    return RunPlan(Order.unknown, (kept,), fewest, notes, tuple(failed))
