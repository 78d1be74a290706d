"""A study: one command's cells, run one after the other, each analysed once, and reported.

The only place where running and analysing meet: neither package knows the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import analysis, workload
from labkit.config import Experiment, Redo
from labkit.experiment import StudyError, progress, runner
from labkit.experiment.arms import ComposedCell, to_cells
from labkit.experiment.cell_file import refuse_changes

if TYPE_CHECKING:
    from labkit.analysis.study_analysis import Analyst
    from labkit.experiment.cell import Cell
    from labkit.experiment.launcher import Launcher


class Study:
    """The cells that a command asks for, and the folder that they share.

    ``launcher`` carries out the runs; by default one fresh process per run.
    """

    def __init__(
        self, out: Path, composed: Sequence[ComposedCell], launcher: Launcher | None = None
    ) -> None:
        self.out = out
        self._composed = {cell.name: cell for cell in composed}
        self._launcher = launcher
        self._analyst: Analyst | None = None

    def refuse_changes(self) -> None:
        """Refuse a folder that holds other arms or another design; write nothing.

        Raises
        ------
        ConfigError
            One line with the first difference.
        """
        for cell in self._cells():
            refuse_changes(cell)

    def run(self, name: str, folder: Path) -> None:
        """Run what is missing of a cell, analyse it and show its table.

        What stops only this cell is said in one line, and the cell stays unfinished: the
        next cells run, and the study's exit code tells.
        """
        composed = self._composed[name]
        show = progress.create(sys.stderr)
        try:
            _prepare(composed.experiments.values(), show)
            for cell in to_cells(composed, folder):
                self._run(cell, show, composed.experiment.redo is Redo.failed)
        except StudyError as error:
            print(f"labkit: {name}: {error}", file=sys.stderr)

    def _run(self, cell: Cell, show: progress.Progress, redo_failed: bool) -> None:
        analyst = self._analyses()
        runner.run_cell(
            cell, self._launcher, show, redo_failed=redo_failed, decided=analyst.decided
        )
        analysis.write_cell(cell.dir, analyst)
        analysis.print_cell(cell.dir, analyst=analyst)
        analysis.write_study(cell.dir.parent, plots=False, analyst=analyst)

    def finish(self) -> int:
        """Draw the study's plots, and return its exit code from its cells' files."""
        if not all((cell.dir / "cell.json").exists() for cell in self._cells()):
            return 1
        cells = analysis.write_study(self.out, analyst=self._analyses())
        return max(cell.status for cell in cells)

    def _analyses(self) -> Analyst:
        """Load the statistics when there is something to analyse."""
        from labkit.analysis.study_analysis import Analyst

        if self._analyst is None:
            self._analyst = Analyst()
        return self._analyst

    def _cells(self) -> Iterable[Cell]:
        for one in self._composed.values():
            yield from to_cells(one, self.out / one.name)


def _prepare(asked: Iterable[Experiment], show: progress.Progress) -> None:
    """Build once what the arms' workers need: model directories and tokenised prompts."""
    ready: list[Experiment] = []
    for experiment in asked:
        if experiment in ready:
            continue
        if not experiment.workload.times_kernels:
            show.note(f"preparing model={experiment.model.name} and its prompts")
        workload.prepare(experiment)
        ready.append(experiment)
