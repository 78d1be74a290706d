"""The runner of a study: one command's cells, each run and analysed, then reported together.

Only this module joins the experiment and the analysis: the experiment does not import
the reports, and the analysis does not import the runners.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import analysis, workload
from labkit.cli.program_base import write_utf8
from labkit.config import ConfigError, Experiment, Redo
from labkit.experiment import StudyError, progress_display
from labkit.experiment.compose.cell_composer import ComposedCell, to_cells
from labkit.experiment.launch.run_launcher import LaunchHistory, WorkerLauncher
from labkit.experiment.progress_display import Progress
from labkit.experiment.schedule import cell_runner
from labkit.experiment.schedule.cell_manifest import stopped_cases
from labkit.experiment.schedule.design_change_check import refuse_changes, refuse_links
from labkit.experiment.schedule.pilot_and_allocation import with_allocation
from labkit.machine.worker_environment import core_count
from labkit.records import RecordError, describe_last_session

if TYPE_CHECKING:
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.experiment.cell import ReadyCell
    from labkit.experiment.launch.run_launcher import RunLauncher


# While a study runs, the report of all cells is rewritten repeatedly. Every cell makes that slower,
# so the rewriting may take at most this share of the study's time.
MAX_REPORT_SHARE = 0.1


class StudyRunner:
    """The cells of one command, and the folder that they share.

    ``launcher`` carries out the runs; by default, every run gets a fresh process.

    A job launcher pickles the study and sends it to other processes. The pickled study has no
    cells: each job composes its own cell again and writes only that cell's files. The process
    that the user started writes the report of all cells.
    """

    def __init__(
        self, out: Path, composed: Sequence[ComposedCell], launcher: RunLauncher | None = None
    ) -> None:
        self.out = out
        self._composed = {cell.name: cell for cell in composed}
        self._launcher, self._history = launcher, LaunchHistory()
        self._prepared: set[str] = set()  # names of cells
        self._analysis_cache: AnalysisCache | None = None
        self.is_first_process = True
        self._report_due = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Drop the cells and cached analyses, so that the pickle does not grow with the study."""
        return {
            **self.__dict__,
            "_composed": {},
            "_prepared": set(),
            "_analysis_cache": None,
            "is_first_process": False,
        }

    @property
    def has_several_cells(self) -> bool:
        return len(self._composed) > 1

    def refuse_changes(self) -> None:
        """Check that the arms and designs in the folder are this study's. Nothing is written.

        Raises ``ConfigError`` if an arm or a design differs, or a file in the folder is a link.
        """
        refuse_links(self.out.iterdir() if self.out.is_dir() else ())
        for cell in self._cells():
            refuse_changes(cell)

    def check_servers(self) -> None:
        """Raise ``ConfigError`` if the program of an arm's server is not installed on this host."""
        for composed in self._composed.values():
            for name, experiment in composed.experiments.items():
                if experiment.engine.name == "openai":
                    from labkit.engine import openai

                    try:
                        openai.check_installed(experiment.engine)
                    except ConfigError as error:
                        raise ConfigError(f"arm {name}: {error}") from None

    def prepare(self) -> None:
        """Build or read what the runs of all cells need: models and prompts, into the cache.

        So a mistake that only these show (a request that does not fit into the KV pool) is found
        before anything is written to the study's folder: ``ConfigError``.
        """
        cells = self._composed.values()
        _prepare(
            (experiment for cell in cells for experiment in cell.experiments.values()),
            progress_display.create_progress(sys.stderr),
        )
        self._prepared |= self._composed.keys()

    def run(
        self, name: str, folder: Path, compose: Callable[[], ComposedCell] | None = None
    ) -> None:
        """Run the missing runs of a cell, analyse the cell and print its table.

        ``compose`` composes the cell if the study does not have it yet: in a job's process, or for
        a trial that a sweeper has just chosen. An error that stops only this cell is printed in
        one line. The cell then stays unfinished and the next cells run; the study's exit code
        shows the failure.
        """
        write_utf8()  # this may be a launcher's process
        composed = self._composed[name] if compose is None or name in self._composed else compose()
        if self.is_first_process:
            self._composed[name] = composed
        progress = (
            progress_display.create_progress(sys.stderr)
            if self.is_first_process
            else progress_display.PlainProgress(sys.stderr)
        )
        try:
            if name not in self._prepared:
                _prepare(composed.experiments.values(), progress)
            redo = composed.experiment.redo is Redo.failed
            self._run(to_cells(composed, folder)[0], progress, redo)
            for confirming in to_cells(composed, folder)[1:]:  # whose runs follow the first cell's
                self._run(confirming, progress, redo)
        except StudyError as error:
            print(f"labkit: {name}: {error}", file=sys.stderr)

    def objective(self, folder: Path) -> float | None:
        """Return the search objective of the cell in ``folder``, or None if it has no value."""
        try:
            return self._load_analysis().objective(folder)
        except RecordError:  # the cell was not started
            return None

    def _run(self, cell: ReadyCell, progress: Progress, redo_failed: bool) -> None:
        analysis_cache = self._load_analysis()
        cell_runner.run_cell(
            cell,
            self._launcher or WorkerLauncher(progress=progress, history=self._history),
            progress,
            redo_failed=redo_failed,
            analysis=analysis_cache,
        )
        analysis.write_cell(cell.dir, analysis_cache)
        analysis.print_cell(cell.dir, analysis_cache=analysis_cache)
        if self.is_first_process and time.monotonic() >= self._report_due:
            start = time.monotonic()
            analysis.write_study(cell.dir.parent, plots=False, analysis_cache=analysis_cache)
            spent = time.monotonic() - start
            self._report_due = start + spent / MAX_REPORT_SHARE

    def finish(self, pictures: bool = True) -> int:
        """Write the report of all cells, with pictures in files or not; return the exit code.

        The code is the highest status of the cells' analyses, or 1 if a cell has no manifest.
        """
        cells = list(self._cells())
        begun = [cell for cell in cells if (cell.dir / "cell.json").exists()]
        if not begun:
            return 1
        study = analysis.write_study(self.out, pictures, self._load_analysis(), core_count())
        return max(int(len(begun) < len(cells)), study.exit_code)

    def decided(self) -> Iterator[str]:
        """Yield a line for each row that a look has decided in a cell that is not finished."""
        for cell in self._cells():
            stopped = stopped_cases(cell, cell.design.blocks)
            if stopped and cell_runner.unfinished(cell):
                rows = self._load_analysis().decided_rows(cell.dir, cell.rows_of(stopped))
                yield from (progress_display.DecidedRow(**row).line for row in rows)

    def unfinished(self) -> Iterator[str]:
        """Yield a line per cell with missing runs: their number, and how its last session ended."""
        for cell in self._cells():
            if missing := cell_runner.unfinished(cell):
                number = len(cell.schedule())
                runs = f"{len(missing)} of {number} run{'s are' if number > 1 else ' is'} missing"
                yield f"{cell.name}: {runs}; {describe_last_session(cell.dir)}"

    def _load_analysis(self) -> AnalysisCache:
        from labkit.analysis.studies.study_analysis import MAX_RECORDS, AnalysisCache

        if self._analysis_cache is None:
            self._analysis_cache = AnalysisCache(MAX_RECORDS)
        return self._analysis_cache

    def _cells(self) -> Iterable[ReadyCell]:
        for composed in self._composed.values():
            yield from map(with_allocation, to_cells(composed, self.out / composed.name))


def _prepare(experiments: Iterable[Experiment], progress: Progress) -> None:
    """Build the model directories and tokenised prompts that workers need, each only once."""
    prepared: list[Experiment] = []
    notes: set[str] = set()
    for experiment in experiments:
        if experiment in prepared:
            continue
        note = _preparation_note(experiment)
        if note is not None and note not in notes:
            progress.note(note)
            notes.add(note)
        workload.prepare(experiment)
        prepared.append(experiment)


def _preparation_note(experiment: Experiment) -> str | None:
    """Return a line about the preparation, or None if it takes less than a second."""
    if experiment.workload.kind == "headroom":
        return None  # arithmetic on the model's configuration
    if experiment.workload.loads_model:
        return f"preparing model={experiment.model.name} and its prompts"
    if not experiment.workload.made or experiment.workload.clips is not None:
        return None
    return f"preparing the clips of workload={experiment.workload.name} (once per machine)"
