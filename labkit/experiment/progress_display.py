"""Progress of a running cell: runs done and time left.

On a terminal it is one live line, refreshed at most once a second; elsewhere, one line per event.
It never shows an effect, so that nobody stops a study early because of one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from labkit.analysis.number_format import count_text
from labkit.experiment.permuted_blocks import Run
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.experiment.cell import Cell

REFRESH_S = 1.0


class Progress:
    """Receiver of a running cell's events. This base class ignores them all."""

    _cell_dir: Path | None = None  # the folder of the running cell

    def begin(self, cell: Cell, total: int, done: int) -> None:
        """Begin a cell of ``total`` runs; ``done`` of them were done by an earlier command."""

    def started(self, runs: Sequence[Run]) -> None:
        """Handle the start of a process, for one run or for all runs that share it."""

    def tick(self) -> None:
        """Handle a tick, about once a second."""

    def run_ended(self, record: Record) -> None:
        """Handle the end of a run, whose record is on disk."""

    def note(self, line: str) -> None:
        """Show a line of text to the user."""

    def _failure(self, record: Record) -> str:
        """Return the reason that a run failed, with the path of its log.

        If another run ended the process that both runs shared, this other run is the reason.
        """
        culprit = record.notes.get("failed_by")
        if culprit is not None:
            return f"{record.outcome}: {culprit} ended the process that it shared with this run"
        log = record.notes.get("log")
        where = f"; the log is {self._cell_dir / log}" if log and self._cell_dir else ""
        return f"{record.outcome}: {record.detail}{where}"

    def end(self) -> None:
        """End the cell, finished or not."""


class RemainingTime:
    """Elapsed and remaining time of a cell.

    The remaining time is the mean time of this session's runs times the number of runs left.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.done_now = total, done, 0
        self.start = time.monotonic()
        self._started, self._runs_in_process = self.start, 1
        self._spent = 0.0

    def started(self, runs_in_process: int = 1) -> None:
        """Start timing a process with ``runs_in_process`` runs. Idle time before is not counted."""
        self._started, self._runs_in_process = time.monotonic(), runs_in_process

    def run_ended(self) -> None:
        """Count one run and its share of its process's time."""
        self._spent += (time.monotonic() - self._started) / self._runs_in_process
        self.done += 1
        self.done_now += 1

    def line(self) -> str:
        """Return ``run 7/24, 0:41 elapsed, about 1:20 left``."""
        text = f"run {min(self.done + 1, self.total)}/{self.total}, "
        text += f"{format_duration(time.monotonic() - self.start)} elapsed"
        if self.done_now:
            left_s = self._spent / self.done_now * (self.total - self.done)
            text += f", about {format_duration(left_s)} left"
        return text


def format_duration(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


class PlainProgress(Progress):
    """One line per event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._time = RemainingTime(0, 0)
        self._blocks = 0

    def begin(self, cell: Cell, total: int, done: int) -> None:
        """Print the number of runs and blocks."""
        self._time, self._blocks = RemainingTime(total, done), cell.design.blocks
        self._cell_dir = cell.dir
        before = f", {done} done before" if done else ""
        runs, blocks = count_text(total, "run"), count_text(self._blocks, "block")
        self.note(f"{cell.name}: {runs} in {blocks}{before}")

    def started(self, runs: Sequence[Run]) -> None:
        """Print nothing; the line follows when the run ends."""
        self._time.started(len(runs))

    def run_ended(self, record: Record) -> None:
        """Print which run ended, and its failure if it failed."""
        line = self._time.line()
        self._time.run_ended()
        failed = "" if record.ok else f": {self._failure(record)}"
        self.note(f"block {record.block + 1}/{self._blocks}, {record.arm}, {line}{failed}")

    def note(self, line: str) -> None:
        """Print the line."""
        print(line, file=self.stream, flush=True)


class LiveProgress(Progress):
    """A live line below the notes (rich)."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text: Any = Text
        self._console = Console(file=stream)
        self._live: Any = Live(console=self._console, auto_refresh=False, transient=True)
        self._time = RemainingTime(0, 0)
        self._blocks = 0
        self._now = ""
        self._shown = 0.0

    def begin(self, cell: Cell, total: int, done: int) -> None:
        """Start the live line."""
        self._time, self._blocks = RemainingTime(total, done), cell.design.blocks
        self._cell_dir = cell.dir
        self._live.start()

    def started(self, runs: Sequence[Run]) -> None:
        """Show the run's arm, or the number of interleaved arms."""
        self._time.started(len(runs))
        arms = runs[0].arm if len(runs) == 1 else f"{len(runs)} arms interleaved"
        self._now = f"block {runs[0].block + 1}/{self._blocks}, {arms}"
        self.tick()

    def tick(self) -> None:
        """Refresh the line, at most once a second."""
        now = time.monotonic()
        if now - self._shown >= REFRESH_S:
            self._shown = now
            line = ", ".join(part for part in (self._now, self._time.line()) if part)
            self._live.update(self._text(line), refresh=True)

    def run_ended(self, record: Record) -> None:
        """Count the run, and print its failure if it failed."""
        self._time.run_ended()
        if not record.ok:
            self.note(f"{record.run}: {self._failure(record)}")

    def note(self, line: str) -> None:
        """Print the line above the live line."""
        self._console.print(line, markup=False, highlight=False)

    def end(self) -> None:
        """Remove the live line."""
        self._live.stop()


def create_progress(stream: TextIO | None = None) -> Progress:
    """Return a live line for a terminal, plain lines for another stream (default: stderr)."""
    stream = sys.stderr if stream is None else stream
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)
