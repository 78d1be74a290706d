"""What a person sees while a cell runs: how far it is, and never an effect.

On a terminal one live line, refreshed at most once a second; elsewhere plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from labkit.experiment.permuted_blocks import Run
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.experiment.cell import Cell

REFRESH_S = 1.0


class Progress:
    """Is told what happens, and shows nothing."""

    def begin(self, cell: Cell, total: int, done: int) -> None:
        """A cell starts: ``total`` runs, of which ``done`` were done before."""

    def started(self, runs: Sequence[Run]) -> None:
        """A run starts, or all those that share a process."""

    def tick(self) -> None:
        """About a second has passed."""

    def run_ended(self, record: Record) -> None:
        """A run's record is on disk."""

    def note(self, line: str) -> None:
        """Something to say in one line."""

    def end(self) -> None:
        """The cell is done, or stopped."""


class Clock:
    """Elapsed and remaining time: the mean of this session's runs, times what is left."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.here = total, done, 0
        self.start = time.monotonic()
        self._started, self._together = self.start, 1
        self._spent = 0.0

    def started(self, together: int = 1) -> None:
        """Start to count the time of so many runs in one process (preparing is not counted)."""
        self._started, self._together = time.monotonic(), together

    def run_ended(self) -> None:
        """Count one run, and its share of its process's time."""
        self._spent += (time.monotonic() - self._started) / self._together
        self.done += 1
        self.here += 1

    def line(self) -> str:
        """Return ``run 7/24, 0:41 elapsed, about 1:20 left``."""
        text = f"run {min(self.done + 1, self.total)}/{self.total}, "
        text += f"{clock(time.monotonic() - self.start)} elapsed"
        if self.here:
            text += f", about {clock(self._spent / self.here * (self.total - self.done))} left"
        return text


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


class Plain(Progress):
    """One line per event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._clock = Clock(0, 0)
        self._blocks = 0

    def begin(self, cell: Cell, total: int, done: int) -> None:
        """Say what is ahead."""
        self._clock, self._blocks = Clock(total, done), cell.design.blocks
        before = f", {done} done before" if done else ""
        self.note(f"{cell.name}: {total} runs in {self._blocks} blocks{before}")

    def started(self, runs: Sequence[Run]) -> None:
        """Say nothing yet: the end says more."""
        self._clock.started(len(runs))

    def run_ended(self, record: Record) -> None:
        """Say which run ended, and why if it failed."""
        line = self._clock.line()
        self._clock.run_ended()
        failed = "" if record.ok else f": {record.outcome}: {record.detail}"
        self.note(f"block {record.block + 1}/{self._blocks}, {record.arm}, {line}{failed}")

    def note(self, line: str) -> None:
        """Write one line."""
        print(line, file=self.stream, flush=True)


class Live(Progress):
    """A live line below the notes (rich)."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive
        from rich.text import Text

        self._text: Any = Text
        self._console = Console(file=stream)
        self._live: Any = RichLive(console=self._console, auto_refresh=False, transient=True)
        self._clock = Clock(0, 0)
        self._blocks = 0
        self._now = ""
        self._shown = 0.0

    def begin(self, cell: Cell, total: int, done: int) -> None:
        """Start the live line."""
        self._clock, self._blocks = Clock(total, done), cell.design.blocks
        self._live.start()

    def started(self, runs: Sequence[Run]) -> None:
        """Show the run, or how many take turns."""
        self._clock.started(len(runs))
        arms = runs[0].arm if len(runs) == 1 else f"{len(runs)} arms in turns"
        self._now = f"block {runs[0].block + 1}/{self._blocks}, {arms}"
        self.tick()

    def tick(self) -> None:
        """Refresh, if the last refresh was a second ago."""
        now = time.monotonic()
        if now - self._shown >= REFRESH_S:
            self._shown = now
            line = ", ".join(part for part in (self._now, self._clock.line()) if part)
            self._live.update(self._text(line), refresh=True)

    def run_ended(self, record: Record) -> None:
        """Count the run; say why it failed if it did."""
        self._clock.run_ended()
        if not record.ok:
            self.note(f"{record.run}: {record.outcome}: {record.detail}")

    def note(self, line: str) -> None:
        """Write one line above the live line."""
        self._console.print(line, markup=False, highlight=False)

    def end(self) -> None:
        """Take the live line away."""
        self._live.stop()


def create(stream: TextIO | None = None) -> Progress:
    """Return live progress on a terminal, plain lines elsewhere (standard error by default)."""
    stream = sys.stderr if stream is None else stream
    return Live(stream) if stream.isatty() else Plain(stream)
