"""A study: one command's cells, run one after the other, each analysed once, and reported.

The only place where running and analysing meet: neither package knows the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import analysis, workload
from labkit.config import Experiment, Redo
from labkit.experiment import StudyError, cell_runner, progress_display
from labkit.experiment.cell_composer import ComposedCell, to_cells
from labkit.experiment.cell_manifest import refuse_changes
from labkit.records import describe_last_session

if TYPE_CHECKING:
    from labkit.analysis.study_analysis import AnalysisCache
    from labkit.experiment.cell import Cell
    from labkit.experiment.run_launcher import RunLauncher


REPORTING = 0.1  # of a study's time at most, for a report of all cells grows with them


class Study:
    """The cells that a command asks for, and the folder that they share.

    ``launcher`` carries out the runs; by default one fresh process per run. Sent to another
    process, a study has no cells: whoever runs one there composes it, and writes its files only.
    The report of all is written where the study was asked for.
    """

    def __init__(
        self, out: Path, composed: Sequence[ComposedCell], launcher: RunLauncher | None = None
    ) -> None:
        self.out = out
        self._composed = {cell.name: cell for cell in composed}
        self._launcher = launcher
        self._analysis_cache: AnalysisCache | None = None
        self._home = True
        self._report_due = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what would make every job as large as the study."""
        return {**self.__dict__, "_composed": {}, "_analysis_cache": None, "_home": False}

    def refuse_changes(self) -> None:
        """Refuse a folder that holds other arms or another design; write nothing.

        Raises
        ------
        ConfigError
            One line with the first difference.
        """
        for cell in self._cells():
            refuse_changes(cell)

    def run(
        self, name: str, folder: Path, compose: Callable[[], ComposedCell] | None = None
    ) -> None:
        """Run what is missing of a cell, analyse it and show its table.

        ``compose`` makes the cell anew, in a process that the study was sent to. What stops
        only this cell is said in one line, and the cell stays unfinished: the next cells run,
        and the study's exit code tells.
        """
        composed = self._composed[name] if compose is None or self._home else compose()
        show = (
            progress_display.create(sys.stderr)
            if self._home
            else progress_display.Plain(sys.stderr)
        )
        try:
            _prepare(composed.experiments.values(), show)
            for cell in to_cells(composed, folder):
                self._run(cell, show, composed.experiment.redo is Redo.failed)
        except StudyError as error:
            print(f"labkit: {name}: {error}", file=sys.stderr)

    def _run(self, cell: Cell, show: progress_display.Progress, redo_failed: bool) -> None:
        analysis_cache = self._analyses()
        cell_runner.run_cell(
            cell, self._launcher, show, redo_failed=redo_failed, decided=analysis_cache.decided
        )
        analysis.write_cell(cell.dir, analysis_cache)
        analysis.print_cell(cell.dir, analysis_cache=analysis_cache)
        if self._home and time.monotonic() >= self._report_due:
            start = time.monotonic()
            analysis.write_study(cell.dir.parent, plots=False, analysis_cache=analysis_cache)
            spent = time.monotonic() - start
            self._report_due = start + spent / REPORTING

    def finish(self) -> int:
        """Write the report of all cells, and return the exit code that their files say."""
        cells = list(self._cells())
        begun = [cell for cell in cells if (cell.dir / "cell.json").exists()]
        if not begun:
            return 1
        found = analysis.write_study(self.out, analysis_cache=self._analyses())
        return max(int(len(begun) < len(cells)), *(one.status for one in found))

    def unfinished(self) -> Iterator[str]:
        """Name every cell that lacks blocks, and what became of whoever worked on it."""
        for cell in self._cells():
            left = cell_runner.unfinished(cell)
            if left:
                runs = f"{len(left)} of {len(cell.schedule())} runs are missing"
                yield f"{cell.name}: {runs}; {describe_last_session(cell.dir)}"

    def _analyses(self) -> AnalysisCache:
        """Load the statistics when there is something to analyse."""
        from labkit.analysis.study_analysis import AnalysisCache

        if self._analysis_cache is None:
            self._analysis_cache = AnalysisCache()
        return self._analysis_cache

    def _cells(self) -> Iterable[Cell]:
        for one in self._composed.values():
            yield from to_cells(one, self.out / one.name)


def _prepare(asked: Iterable[Experiment], show: progress_display.Progress) -> None:
    """Build once what the arms' workers need: model directories and tokenised prompts."""
    ready: list[Experiment] = []
    said: set[str] = set()
    for experiment in asked:
        if experiment in ready:
            continue
        note = _what_is_prepared(experiment)
        if note is not None and note not in said:
            show.note(note)
            said.add(note)
        workload.prepare(experiment)
        ready.append(experiment)


def _what_is_prepared(experiment: Experiment) -> str | None:
    """Say what takes a while; None where nothing does."""
    if experiment.workload.kind == "headroom":
        return None  # arithmetic on the model's configuration
    if experiment.workload.serves:
        return f"preparing model={experiment.model.name} and its prompts"
    if not experiment.workload.made or experiment.workload.clips is not None:
        return None
    return f"preparing the clips of workload={experiment.workload.name} (made once, and kept)"
