"""The plan: what a command would run, for how long, in how much memory, and what it can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from labkit import workload
from labkit.config import CONTROL, Isolation
from labkit.experiment import power_forecast
from labkit.experiment.cell import Cell
from labkit.experiment.cell_composer import ComposedCell, to_cells
from labkit.experiment.cell_runner import unfinished
from labkit.experiment.study_history import StudyHistory
from labkit.machine import memory_profile
from labkit.workload.measurement import Estimate


@dataclass(frozen=True)
class CellPlan:
    """A cell's schedule and estimates: seconds in all, bytes of the largest process.

    ``minute``: what a minute sees; None for what only confirms another cell. ``foreseen``: what
    the arms' requests will meet.
    """

    cell: Cell
    to_run: int
    seconds: float
    bytes: int
    sees: str
    minute: str | None
    start_up: str
    apart: str | None
    foreseen: tuple[str, ...]

    @property
    def runs(self) -> int:
        """All runs of the design."""
        return len(self.cell.schedule())


def plan_cells(composed: ComposedCell, out: Path, past: StudyHistory) -> list[CellPlan]:
    """Estimate a cell and what confirms it; nothing is run or written."""
    cell, *confirming = to_cells(composed, out / composed.name)
    first = _plan(cell, composed, past, power_forecast.in_a_minute(composed, past))
    return [first, *(_plan(other, composed, past, None) for other in confirming)]


def _plan(
    cell: Cell, composed: ComposedCell, past: StudyHistory, in_a_minute: str | None
) -> CellPlan:
    costs = {name: workload.estimate(arm) for name, arm in composed.experiments.items()}
    todo = unfinished(cell) if (cell.dir / "cell.json").exists() else cell.schedule()
    together = max if cell.design.isolation is Isolation.process else sum
    return CellPlan(
        cell=cell,
        to_run=len(todo),
        seconds=sum(costs[run.arm].seconds for run in todo),
        bytes=together(cost.bytes for cost in costs.values()),
        sees=power_forecast.sees(cell, composed, past),
        minute=in_a_minute,
        start_up=power_forecast.start_up(composed, past),
        apart=composed.apart,
        foreseen=tuple(_foreseen({arm.name: costs[arm.name] for arm in composed.arms})),
    )


def _foreseen(costs: Mapping[str, Estimate]) -> Iterator[str]:
    """Yield what is foreseen of the arms, once where they share it."""
    arms: dict[str, list[str]] = {}
    for arm, cost in costs.items():
        for sentence in cost.foreseen if arm != CONTROL else ():
            arms.setdefault(sentence, []).append(arm)
    everybody = len(costs) - (CONTROL in costs)
    for sentence, names in arms.items():
        yield sentence if len(names) == everybody else f"{', '.join(names)}: {sentence}"


def print_plan(composed: Sequence[ComposedCell], out: Path) -> None:
    """Print every cell's schedule and estimates."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, past = Console(highlight=False), StudyHistory(out)
    plans = [plan for cell in composed for plan in plan_cells(cell, out, past)]
    for plan in plans:
        design = plan.cell.design
        table = Table(title=escape(_title(plan.cell)), title_justify="left", title_style="bold")
        table.add_column("block", justify="right")
        table.add_column("runs, in this order", overflow="fold")
        for block, runs in groupby(plan.cell.schedule(), key=lambda run: run.block):
            table.add_row(str(block + 1), escape("  ".join(run.arm for run in runs)))
        console.print(table)
        alone = design.isolation is Isolation.process
        where = "run" if alone else "block (all its runs share one process)"
        left = "" if plan.to_run == plan.runs else f", {plan.to_run} still to run"
        console.print(
            f"{plan.runs} runs ({design.blocks} blocks x {design.runs_per_block} x "
            f"{len(plan.cell.arms)} arms){left}; estimated: {_clock(plan.seconds)} "
            f"and {plan.bytes / 2**30:.1f} GiB per {where}"
        )
        here = memory_profile.this_machine().total
        if plan.bytes > here:
            console.print(
                f"that is more than this machine's {here / 2**30:.1f} GiB: it will not fit"
            )
        for sentence in plan.foreseen:
            console.print(escape(sentence))
        if plan.apart is not None:
            console.print(escape(f"every run in a process of its own: {plan.apart}"))
        if design.looks:
            at = ", ".join(f"{look.blocks} (alpha {look.alpha:g})" for look in design.looks)
            console.print(f"ends where all is decided, at a look after so many blocks: {at}")
        console.print(escape(plan.start_up))
        console.print(escape(f"seed {plan.cell.seed}; {plan.sees}"))
        if plan.minute is not None:
            console.print(escape(plan.minute))
        console.print()
    total = sum(plan.seconds for plan in plans)
    if len(plans) > 1:
        console.print(f"{len(plans)} cells, estimated {_clock(total)} in all")
    console.print("plan=true: nothing was run, nothing was written")


def _title(cell: Cell) -> str:
    return cell.name if cell.scale is None else f"{cell.name} (scale={cell.scale})"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
