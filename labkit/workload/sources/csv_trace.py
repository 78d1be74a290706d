"""Traces that are CSV files of arrival times and lengths, without texts.

A request whose prompt or output has no tokens failed when the trace was recorded, and is left out.
Prompts are random token ids that share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from labkit.config import ConfigError, Experiment
from labkit.machine.file_digest import FileState
from labkit.workload.sources import bounded_reader
from labkit.workload.sources.trace_source import TraceLine, TraceSource

MAX_COUNT = 10**12  # a larger number is a mistake, and its digits would fill the message


@dataclass(frozen=True)
class LengthTable:
    """The format of a trace: its columns, and how to read its times."""

    # Names of the columns of arrival times, prompt tokens and output tokens.
    columns: tuple[str, str, str]
    # Converts the text of an arrival time to seconds since any origin. It raises ``ValueError`` if
    # the text is not a time.
    seconds: Callable[[str], float]

    def source(self) -> TraceSource:
        """Return the prompt source that reads files of this format."""
        return TraceSource(self._first_requests)

    def _first_requests(self, experiment: Experiment) -> tuple[TraceLine, ...]:
        path = experiment.workload.prompts.path or ""
        return _read(self, path, bounded_reader.limit(experiment), bounded_reader.state_of(path))

    def requests(self, path: str) -> Iterator[TraceLine]:
        """Yield a file's requests, timed from the first; raise ``ConfigError`` at a bad line."""
        start: float | None = None
        for where, (time, *lengths) in bounded_reader.table_rows(path, self.columns):
            seconds = self._time(where, time)
            prompt, output = (
                _count(where, *named) for named in zip(self.columns[1:], lengths, strict=True)
            )
            if not (prompt and output):
                continue
            start = seconds if start is None else start
            try:
                yield TraceLine(round((seconds - start) * 1e3, 3), prompt, output)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None

    def _time(self, where: str, text: str) -> float:
        try:
            seconds = self.seconds(text)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            raise ConfigError(f"{where}: {self.columns[0]} is {text[:40]!r}, not a time")
        return seconds


def _count(where: str, name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= MAX_COUNT and value.is_integer()):
        raise ConfigError(f"{where}: {name} is {text[:40]!r}, not a whole number of 0 or more")
    return int(value)


@lru_cache(maxsize=4)
def _read(table: LengthTable, path: str, limit: int, state: FileState) -> tuple[TraceLine, ...]:
    requests = tuple(islice(table.requests(path), limit))
    bounded_reader.refuse_more(path, requests)
    return requests
