"""Progress of a running cell: runs done and time left.

On a terminal it is one live line, refreshed at most once a second, below a table of the rows that
looks have decided; elsewhere, one line per event. It shows no effect of a row that is still
measured, so that nobody stops a study early because of one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from labkit.analysis.text_format import join_names
from labkit.config import count_text
from labkit.experiment.permuted_blocks import Run
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.experiment.cell import ReadyCell

REFRESH_S = 1.0
PLAIN_PERIOD_S = 30.0  # between lines within one process, without a terminal
COUNT = re.compile(r"(?P<done>\d+) of (?P<total>\d+)")


@dataclass(frozen=True)
class DecidedRow:
    """A row that a look has decided for an arm; it is not measured any longer."""

    row: str
    arm: str
    verdict: str
    effect: str
    interval: str

    @property
    def line(self) -> str:
        return f"decided: {self.row}: {self.arm} {self.verdict}, {self.effect} ({self.interval})"


class Progress:
    """Receiver of a running cell's events. This base class shows none of them."""

    def __init__(self) -> None:
        self._cell_dir: Path | None = None  # the folder of the running cell
        self._time = RemainingTime(0, 0)
        self._blocks = 0
        self._now = self._work = ""

    def begin(self, cell: ReadyCell, total: int, done: int) -> None:
        """Begin a cell of ``total`` runs; ``done`` of them were done by an earlier command."""
        self._time, self._blocks = RemainingTime(total, done), cell.design.blocks
        self._cell_dir = cell.dir

    def started(self, runs: Sequence[Run]) -> None:
        """Handle the start of a process, for one run or for all runs that share it."""
        self._time.started(len(runs))
        arms = runs[0].arm if len(runs) == 1 else f"{len(runs)} arms interleaved"
        self._now, self._work = f"block {runs[0].block + 1}/{self._blocks}, {arms}", ""

    def tick(self) -> None:
        """Handle a tick, about once a second."""

    def working(self, text: str) -> None:
        """Take what the running process does, for example ``8 of 32 requests``; "": unknown."""
        self._work = with_share(text)

    def _position(self) -> str:
        """Return where the running process is, and how long the cell takes."""
        return ", ".join(filter(None, (self._now, self._work, self._time.line())))

    def run_ended(self, record: Record) -> None:
        """Handle the end of a run, whose record is on disk."""
        self._time.run_ended()

    def launch_ended(self, records: Sequence[Record]) -> None:
        """Show in one line the runs of a launch that another run of their process has ended."""
        lost: dict[str, list[str]] = {}
        for record in records:
            if "failed_by" in record.notes:
                lost.setdefault(record.notes["failed_by"], []).append(record.arm)
        for culprit, arms in lost.items():
            self.note(f"also lost, because they shared its process ({culprit}): {join_names(arms)}")

    def note(self, line: str) -> None:
        """Show a line of text to the user."""

    def rows_decided(self, rows: Sequence[DecidedRow], waiting: Sequence[str]) -> None:
        """Show the rows that a look has decided; ``waiting``: the cases that it has not."""
        for row in rows:
            self.note(row.line)

    def _failure(self, record: Record) -> str:
        """Return a failed run's reason and log path, or ``lost`` if another run has ended it."""
        if "failed_by" in record.notes:
            return "lost"
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
        self._started, self._runs_in_process = time.monotonic(), runs_in_process

    def run_ended(self) -> None:
        self._spent += (time.monotonic() - self._started) / self._runs_in_process
        self.done += 1
        self.done_now += 1

    def line(self) -> str:
        """Return ``run 7/24, 0:41 elapsed, about 1:20 left``."""
        if not self.total:
            return ""  # a pilot
        text = f"run {min(self.done + 1, self.total)}/{self.total}, "
        text += f"{format_duration(time.monotonic() - self.start)} elapsed"
        return f"{text}, {self.left}" if self.done_now else text

    @property
    def left(self) -> str:
        """The remaining time, such as ``about 1:20 left``."""
        left_s = self._spent / max(1, self.done_now) * (self.total - self.done)
        return f"about {format_duration(left_s)} left"


def format_duration(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def with_share(text: str) -> str:
    """Return a text with the share that is done: ``8 of 32 requests (25 %)``."""
    match = COUNT.search(text)
    if match is None or not int(match["total"]):
        return text
    return f"{text} ({100 * int(match['done']) / int(match['total']):.0f} %)"


class PlainProgress(Progress):
    """One line per event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream
        self._printed = 0.0

    def begin(self, cell: ReadyCell, total: int, done: int) -> None:
        super().begin(cell, total, done)
        before = f", {done} done before" if done else ""
        runs, blocks = count_text(total, "run"), count_text(self._blocks, "block")
        self.note(f"{cell.name}: {runs} in {blocks}{before}")

    def started(self, runs: Sequence[Run]) -> None:
        super().started(runs)
        self._printed = time.monotonic()

    def tick(self) -> None:
        """Print where a long process is, twice a minute."""
        if self._work and time.monotonic() - self._printed >= PLAIN_PERIOD_S:
            self._printed = time.monotonic()
            self.note(self._position())

    def run_ended(self, record: Record) -> None:
        line = self._time.line()
        super().run_ended(record)
        failed = "" if record.ok else f": {self._failure(record)}"
        self.note(f"block {record.block + 1}/{self._blocks}, {record.arm}, {line}{failed}")

    def note(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def rows_decided(self, rows: Sequence[DecidedRow], waiting: Sequence[str]) -> None:
        """Print a line per row, and one on the others."""
        super().rows_decided(rows, waiting)
        if waiting:
            self.note(f"still measured, {self._time.left}: {join_names(waiting)}")


class LiveProgress(Progress):
    """A live line below the notes (rich)."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        super().__init__()
        self._text: Any = Text
        self._console = Console(file=stream)
        self._live: Any = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = 0.0
        self._decided: list[DecidedRow] = []
        self._waiting: Sequence[str] = ()

    def begin(self, cell: ReadyCell, total: int, done: int) -> None:
        super().begin(cell, total, done)
        self._decided, self._waiting = [], ()
        self._live.start()

    def started(self, runs: Sequence[Run]) -> None:
        super().started(runs)
        self.tick()

    def tick(self) -> None:
        """Refresh the line, at most once a second."""
        now = time.monotonic()
        if now - self._shown >= REFRESH_S:
            self._shown = now
            line = self._text(self._position())
            self._live.update(self._filled(line) if self._decided else line, refresh=True)

    def rows_decided(self, rows: Sequence[DecidedRow], waiting: Sequence[str]) -> None:
        """Fill the table with the rows, and show what is left for the others."""
        self._decided += rows
        self._waiting, self._shown = waiting, 0.0
        self.tick()

    def _filled(self, line: Any) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table("row", "arm", "verdict", "effect", "interval", box=None, pad_edge=False)
        for row in self._decided:
            cells = (row.row, row.arm, row.verdict, row.effect, row.interval)
            table.add_row(*map(self._text, cells))
        for case in self._waiting:
            table.add_row(self._text(case), "", self._text(self._time.left))
        return Group(table, line)

    def run_ended(self, record: Record) -> None:
        super().run_ended(record)
        self._work = ""
        if not record.ok and "failed_by" not in record.notes:
            self.note(f"{record.run}: {self._failure(record)}")

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def end(self) -> None:
        self._live.stop()


def create_progress(stream: TextIO) -> Progress:
    """Return a live line for a terminal, plain lines for another stream."""
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)
