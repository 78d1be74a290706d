"""A study: one command's cells in one folder, run one after the other and reported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labkit.config import (
    CONTROL,
    Claims,
    Experiment,
    Isolation,
    Redo,
    WorkloadKind,
    to_plain,
)
from labkit.experiment import cell as cells
from labkit.experiment import progress, runner
from labkit.experiment.arms import ComposedArm, ComposedCell
from labkit.experiment.cell import Cell
from labkit.experiment.errors import StudyError
from labkit.records import PROCESSES, Arm

CONFIG = ("engine", "model", "workload", "seed")


def to_cells(composed: ComposedCell, folder: Path) -> list[Cell]:
    """Turn a composed cell into what is run: itself, and what confirms it in processes.

    What the arms do to each other in one process, and what differs from process to process,
    is not in the turns; a few blocks of separate processes say whether it matters.
    """
    cell, confirm = to_cell(composed, folder), composed.experiment.design.confirm
    if not confirm or composed.isolation is not Isolation.in_process:
        return [cell]
    apart = replace(
        composed.experiment.design,
        isolation=Isolation.process,
        blocks=confirm,
        looks=[],
        confirm=0,
    )
    name = f"{folder.name}{PROCESSES}"
    return [
        cell,
        replace(cell, dir=folder.with_name(name), name=cell.name + PROCESSES, design=apart),
    ]


def to_cell(composed: ComposedCell, folder: Path) -> Cell:
    """Turn a composed cell into one that can be run in ``folder``."""
    whole = composed.experiment
    claims, baseline = whole.ablation.claims, whole.ablation.baseline_arm
    return Cell(
        dir=folder,
        name=composed.name,
        arms=tuple(_arm(arm, claims, baseline) for arm in composed.arms),
        design=replace(whole.design, isolation=composed.isolation),
        seed=whole.seed,
        question=whole.ablation.question,
        published=whole.ablation.published,
    )


def _arm(arm: ComposedArm, claims: Claims, baseline: str) -> Arm:
    plain = to_plain(arm.experiment)
    claimed = claims.engaged.get(baseline if arm.name == CONTROL else arm.name, [])
    return Arm(
        name=arm.name,
        role=arm.role,
        overrides=to_plain(arm.overrides),
        config={key: plain[key] for key in CONFIG},
        identity=claims.identity.value,
        engaged=tuple(claimed),
    )


def refuse_changes(out: Path, composed: Sequence[ComposedCell]) -> None:
    """Refuse a study whose folder holds other arms or another design; write nothing.

    Raises
    ------
    ConfigError
        One line with the first difference.
    """
    for one in composed:
        for cell in to_cells(one, out / one.name):
            cells.refuse_changes(cell)


def run_and_report(composed: ComposedCell, folder: Path) -> None:
    """Run what is missing of one cell, analyse it and show its table.

    What stops only this cell is said in one line, and the cell stays unfinished: the next
    cells run, and the study's exit code tells.
    """
    from labkit import analysis

    show = progress.create(sys.stderr)
    try:
        _prepare(composed.arms, show)
        redo = composed.experiment.redo is Redo.failed
        for cell in to_cells(composed, folder):
            runner.run_cell(cell, progress=show, redo_failed=redo)
            analysis.write_cell(cell.dir)
            analysis.print_cell(cell.dir)
            analysis.write_study(folder.parent, plots=False)
    except StudyError as error:
        print(f"labkit: {composed.name}: {error}", file=sys.stderr)


def _prepare(arms: Sequence[ComposedArm], show: progress.Progress) -> None:
    """Build once what the arms' workers need: model directories and tokenised prompts."""
    from labkit import workload

    ready: list[Experiment] = []
    for arm in arms:
        if arm.experiment in ready:
            continue
        if arm.experiment.workload.kind is not WorkloadKind.kernel:
            show.note(f"preparing model={arm.experiment.model.name} and its prompts")
        workload.prepare(arm.experiment)
        ready.append(arm.experiment)


def finish(out: Path, composed: Sequence[ComposedCell]) -> int:
    """Draw the study's plots, and give its exit code from its cells' files."""
    from labkit import analysis

    cells = (cell for one in composed for cell in to_cells(one, out / one.name))
    if not all((cell.dir / "cell.json").exists() for cell in cells):
        return 1
    analysis.write_study(out)
    return analysis.exit_code(out)
