"""The form that every tool's results take: a run of an arm, and the fields that it is read from."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.records import CaseRecord, Metric
from labkit.records.metric_registry import METRICS

AGREEMENT = 1e-3  # relative; tools round what they derive
END_OF_TIME_S = 253402300800  # the year 10,000


class ResultFileError(ValueError):
    """A file is no result that labkit can use. The message is a line that names the file."""


@dataclass(frozen=True)
class ImportedRun:
    """One run of an arm: what a tool measured with one process, or one call of the tool."""

    tool: str  # that wrote the file
    file: Path  # that the run is read from
    cases: tuple[CaseRecord, ...]  # repeats within the run are not independent
    started: float | None = None  # seconds since 1970; None if the file does not say
    # What was asked of the arm, such as the number of requests; it must be equal in all runs.
    work: Mapping[str, Any] = field(default_factory=dict)
    # How much that was, such as the number of input tokens; another random seed changes it.
    given: Mapping[str, float] = field(default_factory=dict)
    # How much the arm answered, such as the number of output tokens.
    generated: Mapping[str, float] = field(default_factory=dict)
    # How the arm did it; it must be equal in all runs of an arm.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # The machine, as far as the file describes it: ``host``, ``cpu_model``, ``cores``, ``os``.
    environment: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None  # the reason why the run failed
    arm: str | None = None  # if the file names it
    block: str | None = None  # if the file names it
    # Fields that may be measurements, but whose direction is unknown, and what was not measured.
    unjudged: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()  # lines on what a verdict on such runs would mean
    digest: str | None = None  # of the result, if a file of the tool may hold several

    def __post_init__(self) -> None:
        counts = Counter(case.case for case in self.cases)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ResultFileError(
                f"{self.file}: {twice} comes twice; write each call of the tool to its own file"
            )
        if self.started is not None and not 0 <= self.started < END_OF_TIME_S:
            raise ResultFileError(
                f"{self.file}: a run began at {self.started:g}; times must be in seconds since 1970"
            )


@dataclass(frozen=True)
class ResultFormat:
    """A tool's format: whether a document is of the tool, and the runs in it."""

    tool: str
    recognises: Callable[[Any], bool]
    read: Callable[[Any, Path], Iterator[ImportedRun]]


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object, and its place in the file for messages."""

    data: Mapping[str, Any]
    place: str

    @classmethod
    def of(cls, value: Any, place: str) -> Fields:
        """Return the fields of ``value``, which must be an object."""
        if not isinstance(value, dict):
            raise ResultFileError(f"{place} is {_shown(value)}, not an object")
        return cls(value, place)

    @classmethod
    def listed(cls, document: Any, file: Path, name: str) -> list[Fields]:
        """Return the fields of a document that is an object, or of each object that it lists."""
        items = document if isinstance(document, list) else [document]
        return list(cls({name: items}, f"{file}: ").each(name))

    def __contains__(self, key: str) -> bool:
        """Whether the field exists and is not null."""
        return self.data.get(key) is not None

    def error_at(self, key: str, reason: str) -> ResultFileError:
        return ResultFileError(f"{self.place}{key}: {reason}")

    def at(self, key: str) -> Fields:
        return Fields.of(self._value(key), f"{self.place}{key}.")

    def each(self, key: str) -> Iterator[Fields]:
        """Yield the fields of every object in a list, which must not be empty."""
        items = self._value(key)
        if not isinstance(items, list) or not items:
            raise self.error_at(key, f"is {_shown(items)}, not a list of results")
        for index, item in enumerate(items):
            yield Fields.of(item, f"{self.place}{key}[{index}].")

    def number(self, key: str) -> float:
        """Return a finite number."""
        return self._number(key, self._value(key))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers, which must not be empty."""
        values = self._value(key)
        if not isinstance(values, list) or not values:
            raise self.error_at(key, f"is {_shown(values)}, not a list of numbers")
        return tuple(self._number(key, value) for value in values)

    def known_numbers(self, *keys: str) -> dict[str, float]:
        """Return those of the numbers that exist."""
        return {key: self.number(key) for key in keys if key in self}

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise self.error_at(key, f"is {_shown(value)}, not a text")
        return value

    def only(self, known: Collection[str], also: str = "(?!)") -> None:
        """Refuse a field that is not ``known`` and does not match the pattern ``also``."""
        unknown = next((k for k in self.data if k not in known and not re.fullmatch(also, k)), None)
        if unknown is not None:
            raise self.error_at(
                unknown,
                "labkit does not know this field; was the file edited, or written by a later "
                "version of the tool?",
            )

    def agrees(self, key: str, expected: float) -> None:
        """Refuse the file if a number is not what the other numbers make it."""
        value = self.number(key)
        if not math.isclose(value, expected, rel_tol=AGREEMENT, abs_tol=1e-12):
            raise self.error_at(
                key, f"is {value:.6g}, but the other numbers make it {expected:.6g}; was it edited?"
            )

    def _value(self, key: str) -> Any:
        if key not in self.data:
            raise self.error_at(key, "is missing")
        return self.data[key]

    def _number(self, key: str, value: Any) -> float:
        if not is_number(value) or not math.isfinite(value):
            raise self.error_at(key, f"is {_shown(value)}, not a number")
        return float(value)


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def has_fields(*names: str, listed: bool = False) -> Callable[[Any], bool]:
    """Return whether a document is an object (``listed``: or a list of them) with these fields."""

    def recognises(document: Any) -> bool:
        one = document[0] if listed and isinstance(document, list) else document
        return isinstance(one, dict) and {*names} <= set(one)

    return recognises


def first_item(document: Any, key: str) -> Mapping[str, Any]:
    """Return item 0 of the list ``document[key]``, or an empty map if that is no JSON object."""
    items = document.get(key) if isinstance(document, dict) else None
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}


def metric(
    name: str,
    repeats: Sequence[float],
    unit: str = "",
    better: str = "lower",
    *,
    primary: bool = True,
) -> Metric:
    """Return a metric; without a unit, one of labkit's own, with its unit and direction."""
    if not unit:
        unit, better = METRICS[name].unit, METRICS[name].better
    return Metric(name, unit, better, primary, tuple(repeats))


def seconds(fields: Fields, key: str, form: str | None = None) -> float:
    """Return a field's date, ISO 8601 or ``form`` of ``strptime``, in seconds since 1970.

    A date without a zone is read as UTC: only the order of the runs matters.
    """
    text = fields.text(key)
    try:
        date = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
    except ValueError:
        raise fields.error_at(key, f"is {text!r}, not a date") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
