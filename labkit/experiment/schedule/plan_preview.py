"""The plan of a study (``plan=true``): its runs, time, memory and smallest detectable effects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import workload
from labkit.config import CONTROL, Isolation, Redo, count_text
from labkit.config.option import override_text
from labkit.experiment.cell import ReadyCell
from labkit.experiment.compose.cell_composer import ComposedCell, to_cells
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.progress_display import format_duration
from labkit.experiment.schedule import noise_history, pilot_and_allocation, power_forecast
from labkit.experiment.schedule.cell_manifest import kept_arms
from labkit.experiment.schedule.cell_runner import unfinished, warnings_before
from labkit.experiment.schedule.noise_history import StudyHistory
from labkit.machine import cache_entries
from labkit.machine.facts import memory_capacity
from labkit.records import PROCESSES_SUFFIX, Arm, StudyPath
from labkit.records.metric_registry import METRICS
from labkit.workload.workload_protocols import START_SECONDS, Estimate

if TYPE_CHECKING:
    from rich.table import Table

MEMORY_UNITS = {
    Isolation.in_process: "block (all its runs share one process)",
    Isolation.live: "block (its processes are alive at the same time)",
    Isolation.process: "run",
}
SEPARATE = {
    Isolation.live: "every run in a process of its own, in turns with the block's other runs",
    Isolation.process: "every run in a separate process",
}
MAX_ROWS = 12  # of a schedule's table


@dataclass(frozen=True)
class CellPlan:
    """A cell's schedule and estimates, and lines of text for the plan."""

    cell: ReadyCell
    composed: ComposedCell
    to_run: int  # the number of runs not done yet
    seconds: float  # estimated wall time of these
    bytes: int  # estimated, of the largest run or, if arms take turns, of a block's arms together
    measured_in: str | None  # the earlier cell that gave ``seconds``; None if a model of cost did
    timing: tuple[str, ...]  # what follows from ``design.time``, if something does
    warnings: tuple[str, ...]

    @property
    def runs(self) -> int:
        return len(_schedule(self.cell))


def _schedule(cell: ReadyCell) -> list[Run]:
    """Return all runs of a cell, without those of arms that looks have dropped."""
    return cell.schedule_after_looks(kept_arms(cell))


def plan_cells(composed: ComposedCell, out: Path, history: StudyHistory) -> list[CellPlan]:
    """Plan a cell and, if declared, the cell that confirms it. Nothing is run."""
    return [_plan(cell, composed, history) for cell in to_cells(composed, out / composed.name)]


def _plan(cell: ReadyCell, composed: ComposedCell, history: StudyHistory) -> CellPlan:
    cell, timing = _timing(pilot_and_allocation.with_allocation(cell), composed, history)
    arms = {id(arm): arm for arm in composed.experiments.values()}  # the control is the baseline
    estimates = {key: workload.estimate(arm) for key, arm in arms.items()}
    costs = {name: estimates[id(arm)] for name, arm in composed.experiments.items()}
    redo_failed = composed.experiment.redo is Redo.failed
    begun = (cell.dir / "cell.json").exists()
    to_run = unfinished(cell, redo_failed=redo_failed) if begun else cell.schedule()
    combine = sum if cell.design.isolation.takes_turns else max
    seconds, measured_in = _measured_run_s(cell, composed, history)
    if seconds is None:
        seconds = _modelled_s(cell, costs, to_run)
    else:
        seconds *= len(to_run)
    if cell.timed and (block_s := pilot_and_allocation.allocated_block_s(cell)):
        seconds, measured_in = block_s * len({run.block for run in to_run}), None
    if timing is not None and timing.seconds is not None:
        timing = timing.at_least(_fewest_s(cell, costs), cell)
        seconds, measured_in = timing.seconds or 0.0, timing.folder
    return CellPlan(
        cell=cell,
        composed=composed,
        to_run=len(to_run),
        seconds=seconds,
        bytes=combine(cost.bytes for cost in costs.values()),
        measured_in=None if measured_in is None else history.source(measured_in),
        timing=tuple(_unlimited(cell, seconds)) if timing is None else timing.lines,
        warnings=(
            *(warnings_before(cell) if begun and to_run else ()),
            *_growth(cell, composed),
            *_warnings({arm.name: costs[arm.name] for arm in composed.arms}),
        ),
    )


@dataclass(frozen=True)
class _Timing:
    """What follows from ``design.time``: lines of text, and the cell's seconds if they are known.

    ``folder``: the earlier cell whose pilot gave them.
    """

    lines: tuple[str, ...]
    seconds: float | None = None
    folder: StudyPath | None = None

    def at_least(self, fewest_s: float, cell: ReadyCell) -> _Timing:
        """Return what follows if the fewest blocks take ``fewest_s`` by the workload's estimate.

        What an earlier study measured needs no estimate.
        """
        time_s, blocks = cell.design.time or 0.0, count_text(cell.design.blocks, "block")
        seconds = max(self.seconds or 0.0, fewest_s if self.folder is None else 0.0)
        if seconds <= 1.05 * time_s or len(self.lines) > 1:
            return self
        line = (
            f"{blocks} take {'about' if self.folder else 'at least about'} {_duration(seconds)}, "
            f"longer than design.time={format_duration(time_s)}: fewer could claim nothing"
        )
        return replace(self, lines=(*self.lines, line), seconds=seconds)


def _timing(
    cell: ReadyCell, composed: ComposedCell, history: StudyHistory
) -> tuple[ReadyCell, _Timing | None]:
    """Return the cell as an earlier pilot of its workload would allocate it, and what follows."""
    if not cell.follows_time:
        return cell, None
    time_s = cell.design.time
    for folder, manifest in history.studies(composed, cell.design.isolation):
        runs = len(manifest["arms"]) * int(manifest["design"]["runs_per_block"])
        share = len(cell.arms) * cell.design.runs_per_block / runs
        pilot = pilot_and_allocation.earlier_pilot(folder) if cell.rounds_from_time else None
        block_s = noise_history.median_block_s(folder)
        if pilot is not None:
            starts = 1.0 if cell.design.isolation is Isolation.in_process else share
            limits = pilot_and_allocation.earlier_limits(cell, folder)
            pilot = pilot.for_share(share, starts)
            allocation = pilot_and_allocation.allocation_of(cell, pilot, time_s, limits)
            lines = tuple(pilot_and_allocation.lines_of(cell, allocation, time_s))
        elif block_s is not None and not cell.rounds_from_time and time_s is not None:
            allocation = pilot_and_allocation.blocks_within(cell, share * block_s)
            lines = (f"a block takes {share * block_s:.2g} s",)
        else:
            continue
        looks = pilot_and_allocation.looks_of(cell, allocation.blocks)
        design = replace(cell.design, blocks=allocation.blocks, looks=looks)
        if cell.blocks_from_time:
            cell = replace(cell, design=design)
        return cell, _Timing(lines, allocation.seconds, folder)
    source = "a pilot" if cell.rounds_from_time else "the first block"
    size = "requests" if cell.counts_units else "rounds"
    unknown = {"blocks": cell.blocks_from_time, size: cell.rounds_from_time}
    found = " and ".join(name for name, is_open in unknown.items() if is_open)
    limit = "" if time_s is None else f" for {format_duration(time_s)} (design.time)"
    fewest = f", at least {cell.design.blocks} blocks" if cell.blocks_from_time else ""
    return cell, _Timing((f"{source} will find the {found}{limit}{fewest}",), time_s)


def _unlimited(cell: ReadyCell, seconds: float) -> Iterator[str]:
    """Yield a line if fixed runs take longer than ``design.time``, which then sets nothing."""
    time_s = cell.design.time
    if time_s is not None and not cell.timed and seconds > 1.05 * time_s:
        limit = format_duration(time_s)
        yield f"longer than design.time={limit}: design.blocks and the workload fix the runs"


def _growth(cell: ReadyCell, composed: ComposedCell) -> Iterator[str]:
    """Yield a line if the cell has more blocks than its design, for its number of arms."""
    design, blocks = composed.experiment.design, cell.design.blocks
    declared = design.confirm if cell.name.endswith(PROCESSES_SUFFIX) else design.blocks
    if blocks > declared > 0 and cell.design.runs_per_block == 1 and not composed.blocks_given:
        arms = count_text(composed.tested_arms, "arm")
        yield f"{blocks} blocks instead of {declared}: {arms} could claim nothing with fewer"


def _measured_run_s(
    cell: ReadyCell, composed: ComposedCell, history: StudyHistory
) -> tuple[float | None, StudyPath | None]:
    """Return a run's wall seconds in the newest cell of the same workload and arms; its folder."""
    for path, manifest in history.studies(composed, cell.design.isolation):
        design = manifest["design"]
        alike = design.get("units") == cell.units and noise_history.has_arms(path, cell.arms)
        if alike and (block_s := noise_history.median_block_s(path)) is not None:
            return block_s / (len(cell.arms) * int(design["runs_per_block"])), path
    return None, None


def _fewest_s(cell: ReadyCell, costs: Mapping[str, Estimate]) -> float:
    """Return the seconds of the fewest blocks: their starts alone if runs follow from time."""
    if cell.rounds_from_time:
        costs = {
            arm: replace(cost, seconds=START_SECONDS + cost.server_s) for arm, cost in costs.items()
        }
    return _modelled_s(cell, costs, cell.schedule())


def _modelled_s(cell: ReadyCell, costs: Mapping[str, Estimate], runs: Collection[Run]) -> float:
    seconds = sum(costs[run.arm].seconds for run in runs)
    if cell.design.isolation is not Isolation.in_process:
        return seconds
    # The runs of a block start one process.
    return seconds - START_SECONDS * (len(runs) - len({run.block for run in runs}))


def _warnings(costs: Mapping[str, Estimate]) -> Iterator[str]:
    """Yield each warning once, preceded by the names of its arms unless all arms share it."""
    arms: dict[str, list[str]] = {}
    for arm, cost in costs.items():
        for sentence in cost.warnings if arm != CONTROL else ():
            arms.setdefault(sentence, []).append(arm)
    arm_count = len(costs) - (CONTROL in costs)
    for sentence, names in arms.items():
        yield sentence if len(names) == arm_count else f"{', '.join(names)}: {sentence}"


def print_plan(
    composed: Sequence[ComposedCell], history: StudyHistory, out: Path, written: Sequence[Path]
) -> float:
    """Print every cell's schedule and estimates; return the estimated seconds.

    ``written``: the entries of the cache that composing and planning the cells has written.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    plans = [plan for cell in composed for plan in plan_cells(cell, out, history)]
    for plan in plans:
        scale = "" if plan.cell.scale is None else f" (scale={plan.cell.scale})"
        console.print(f"[bold]{escape(plan.cell.name)}{scale}[/]")
        for line in _question_lines(plan.cell):
            console.print(escape(line))
        console.print(_schedule_table(plan.cell))
        for line in _plan_lines(plan, history):
            console.print(escape(line))
        console.print()
    total = sum(plan.seconds for plan in plans)
    if len(plans) > 1:
        console.print(f"{len(plans)} cells, estimated {_duration(total)} in all")
    console.print(escape(_written_line(written)), soft_wrap=True)
    return total


def _written_line(written: Sequence[Path]) -> str:
    if not written:
        return "plan=true: nothing was run, nothing was written"
    sizes = (f"{path} ({cache_entries.entry_bytes(path) / 1e6:.1f} MB)" for path in written)
    return (
        "plan=true: nothing was run; written to the cache (LABKIT_CACHE), for the runs to read: "
        f"{', '.join(sizes)}"
    )


def _question_lines(cell: ReadyCell) -> Iterator[str]:
    if cell.question:
        yield cell.question
    metrics = "; ".join(map(_metric_text, cell.metrics)) or "what the records name as primary"
    yield f"metric: {metrics}; equivalent within ±{cell.design.margin_pct:g} %"
    (baseline,) = (arm.name for arm in cell.arms if arm.role == "baseline")
    for arm in cell.arms:
        yield f"  {arm.name}: {_arm_text(arm, baseline)}"


def _metric_text(name: str) -> str:
    metric = METRICS.get(name)
    if metric is None:  # the user's own: only its records say which values are better
        return name
    return f"{metric.label} ({metric.unit}, {metric.better} is better)"


def _arm_text(arm: Arm, baseline: str) -> str:
    if arm.role == "control":
        return f"a copy of {baseline}, whose distance from it is noise"
    changes = [f"{key}={override_text(value)}" for key, value in arm.overrides.items()]
    environment = arm.environment or {}
    changes += [f"environment.{key}={override_text(value)}" for key, value in environment.items()]
    text = " ".join(changes) or "as configured"
    return f"the baseline: {text}" if arm.name == baseline else text


def _schedule_table(cell: ReadyCell) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    table.add_column("block", justify="right")
    table.add_column("runs, in this order", overflow="fold")
    blocks = [list(runs) for _, runs in groupby(_schedule(cell), key=lambda run: run.block)]
    # A table that fills the screen hides the lines that matter.
    shown = len(blocks) if len(blocks) <= MAX_ROWS else MAX_ROWS - 1
    for number, runs in enumerate(blocks[:shown], start=1):
        table.add_row(str(number), escape("  ".join(run.arm for run in runs)))
    if hidden := len(blocks) - shown:
        table.add_row("...", f"{hidden} blocks like these, each in its own order")
    return table


def _plan_lines(plan: CellPlan, history: StudyHistory) -> Iterator[str]:
    cell, composed, design = plan.cell, plan.composed, plan.cell.design
    process = MEMORY_UNITS[design.isolation]
    missing = "" if plan.to_run == plan.runs else f", {plan.to_run} still to run"
    measured = "" if plan.measured_in is None else f" (as measured in {plan.measured_in})"
    yield (
        f"{count_text(plan.runs, 'run')} ({count_text(design.blocks, 'block')} x "
        f"{design.runs_per_block} x {count_text(len(cell.arms), 'arm')}){missing}; "
        f"estimated: {_duration(plan.seconds)}{measured} "
        f"and {plan.bytes / 2**30:.1f} GiB per {process}"
    )
    memory = memory_capacity.this_machine().total
    if plan.bytes > memory:
        yield f"this exceeds this machine's {memory / 2**30:.1f} GiB of memory, so it will not fit"
    yield from plan.timing
    yield from plan.warnings
    if composed.separate_processes_reason is not None:
        yield f"{SEPARATE[design.isolation]}: {composed.separate_processes_reason}"
    if looks := [look for look in design.looks if look.blocks <= design.blocks]:
        shown = ", ".join(f"{look.blocks} (alpha {look.alpha:g})" for look in looks)
        done = "leaves one best setting" if cell.sweep else "decides every primary row"
        yield f"ends at the first look that {done}; looks after blocks {shown}"
    if design.eliminate:
        yield "each look may drop settings, so these runs and this time are upper limits"
    yield power_forecast.start_up_line(cell, composed, history)
    effect = power_forecast.detectable_effect_line(cell, composed, history)
    yield f"seed {cell.seed}; {effect}"
    if not cell.name.endswith(PROCESSES_SUFFIX):
        yield power_forecast.one_minute_line(composed, history)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
