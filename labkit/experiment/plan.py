"""The plan: what a command would run, for how long, in how much memory, and what it can see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from labkit import workload
from labkit.experiment import environment
from labkit.experiment.arms import ComposedCell
from labkit.experiment.cell import Cell
from labkit.experiment.record import RecordError, read_cell
from labkit.experiment.runner import unfinished
from labkit.experiment.study import to_cell

EARLIER = 40  # studies looked through for this machine's noise, newest first


@dataclass(frozen=True)
class CellPlan:
    """A cell's schedule and estimates: seconds in all, bytes of the largest arm."""

    cell: Cell
    to_run: int
    seconds: float
    bytes: int
    sees: str

    @property
    def runs(self) -> int:
        """All runs of the design."""
        return len(self.cell.schedule())


def plan_cell(composed: ComposedCell, out: Path) -> CellPlan:
    """Estimate one cell; nothing is run or written."""
    cell = to_cell(composed, out / composed.name)
    costs = {arm.name: workload.estimate(arm.experiment) for arm in composed.arms}
    todo = unfinished(cell) if (cell.dir / "cell.json").exists() else cell.schedule()
    return CellPlan(
        cell=cell,
        to_run=len(todo),
        seconds=sum(costs[run.arm].seconds for run in todo),
        bytes=max(cost.bytes for cost in costs.values()),
        sees=_sees(cell, composed, out),
    )


def print_plan(composed: Sequence[ComposedCell], out: Path) -> None:
    """Print every cell's schedule and estimates."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    plans = [plan_cell(cell, out) for cell in composed]
    for plan in plans:
        design = plan.cell.design
        table = Table(title=escape(plan.cell.name), title_justify="left", title_style="bold")
        table.add_column("block", justify="right")
        table.add_column("runs, in this order", overflow="fold")
        for block, runs in groupby(plan.cell.schedule(), key=lambda run: run.block):
            table.add_row(str(block + 1), escape("  ".join(run.arm for run in runs)))
        console.print(table)
        left = "" if plan.to_run == plan.runs else f", {plan.to_run} still to run"
        console.print(
            f"{plan.runs} runs ({design.blocks} blocks x {design.runs_per_block} x "
            f"{len(plan.cell.arms)} arms){left}; estimated: {_clock(plan.seconds)} "
            f"and {plan.bytes / 2**30:.1f} GiB per run"
        )
        console.print(f"seed {plan.cell.seed}; {plan.sees}\n")
    total = sum(plan.seconds for plan in plans)
    if len(plans) > 1:
        console.print(f"{len(plans)} cells, estimated {_clock(total)} in all")
    console.print("plan=true: nothing was run, nothing was written")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --------------------------------------------------------------------------- noise


def _sees(cell: Cell, composed: ComposedCell, out: Path) -> str:
    """Say the smallest effect this design sees, from this machine's earlier records."""
    from labkit.analysis.power import blocks_needed, detectable_pct
    from labkit.analysis.verdict import fewest_blocks

    design = cell.design
    few = design.blocks < fewest_blocks(design.runs_per_block)
    found = next(_earlier_noise(composed, out), None)
    if found is None:
        unknown = "what it can see is not known: no earlier study of this workload here"
        return f"estimate-only, too few blocks for a verdict; {unknown}" if few else unknown
    sd, source = found
    sees = detectable_pct(sd, design.blocks, design.runs_per_block, design.alpha)
    need = blocks_needed(sd, design.runs_per_block, design.alpha, 1.0)
    least = "too few blocks for a verdict" if few or sees is None else f"sees {sees:.1f} % at best"
    more = "over 1000 blocks" if need is None else f"{need} blocks"
    return f"{least}; {more} would see 1 % (noise of {source})"


def _earlier_noise(composed: ComposedCell, out: Path) -> Iterator[tuple[float, Path]]:
    """Yield run-to-run standard deviations (log scale) of the same workload and machine."""
    here = environment.fingerprint()
    folders = {path for root in (out, Path("outputs")) for path in _cells(root)}
    newest = sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[:EARLIER]:
        try:
            data = read_cell(path.parent)
        except RecordError:
            continue
        found = _noise(data)
        same = environment.same_machine(data.get("environment", {}), here)
        if (
            found is not None
            and same
            and _workload_of(path.parent) == composed.experiment.workload.name
        ):
            yield found, path.parent


def _cells(root: Path) -> Iterator[Path]:
    for pattern in ("*/cell.json", "*/*/cell.json", "*/*/*/cell.json"):
        yield from root.glob(pattern)


def _workload_of(cell_dir: Path) -> str | None:
    from labkit.experiment.record import read_arms

    try:
        arms = read_arms(cell_dir)
    except RecordError:
        return None
    return str(arms[0].config["workload"]["name"]) if arms else None


def _noise(data: Mapping[str, Any]) -> float | None:
    """Give the median noise of the primary rows, from their smallest detectable effects."""
    from statistics import median

    from labkit.analysis.effect import log_ratio
    from labkit.analysis.power import detectable_pct

    design = data["design"]
    unit = detectable_pct(0.01, design["blocks"], design["runs_per_block"], design["alpha"])
    seen = [
        comparison["mde_pct"]
        for row in data.get("rows", [])
        if row["primary"] and not row["skipped"]
        for comparison in row["comparisons"]
        if comparison["mde_pct"] is not None and math.isfinite(comparison["mde_pct"])
    ]
    if not seen or unit is None:
        return None
    return 0.01 * log_ratio(median(seen)) / log_ratio(unit)
