"""A replication: what ``replication.json`` holds. It names kinds of machines, never a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from labkit.analysis.model.dataclass_json import fields_to_json, from_json
from labkit.analysis.model.result_row import EffectInPercent
from labkit.analysis.statistics.replication_test import ReplicationWord
from labkit.analysis.text_format import machine_words
from labkit.records import RecordError, StudyPath, read_json


@dataclass(frozen=True)
class ReplicationSide:
    """One of the two studies: its name, its software and the kind of its machine.

    ``archive_sha256`` is the digest in the archive's comment; None for a folder. ``machine`` has
    the machine fields of a record's environment.
    """

    study: str
    date: str = ""
    archive_sha256: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    git: str | None = None

    @property
    def machine_text(self) -> str:
        """The kind of machine: ``AMD EPYC, 2 cores, 24 GiB, Linux``."""
        return ", ".join(machine_words(self.machine)) or "unknown"


@dataclass(frozen=True)
class MeasuredEffect(EffectInPercent):
    """An arm's effect in one study: medians in the metric's unit, the rest in percent."""

    baseline_median: float | None = None
    median: float | None = None
    effect_pct: float | None = None
    ci_low_pct: float | None = None
    ci_high_pct: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class ReplicatedRow:
    """One arm in one row of both studies, and the decision.

    ``change_pct`` and its limits compare the reader's effect with the author's; ``region_pct`` is
    the largest change that counts as none. ``ratio`` is the reader's effect over the author's, on
    the log scale. ``needed_s``: the seconds that a decision would take. ``reason``: why nothing
    could be decided.
    """

    cell: str
    case: str
    metric: str
    unit: str
    arm: str
    author: MeasuredEffect
    reader: MeasuredEffect
    verdict: str
    change_pct: float | None = None
    change_low_pct: float | None = None
    change_high_pct: float | None = None
    region_pct: float | None = None
    p_adjusted: float | None = None
    ratio: float | None = None
    needed_s: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Replication:
    """An author's question, asked again by a reader.

    ``changes``: what the reader changed, so that it is another question; empty if it is the same.
    ``package_versions``: whose were used, ``ours`` or ``theirs``.
    """

    schema_version: int
    question: str
    author: ReplicationSide
    reader: ReplicationSide
    alpha: float
    package_versions: str = "ours"
    changes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    rows: tuple[ReplicatedRow, ...] = ()

    def name_of(self, row: ReplicatedRow) -> str:
        """Return a row's case, metric and arm, after its cell if there are several."""
        cell = row.cell if len({one.cell for one in self.rows}) > 1 else ""
        return ", ".join(filter(None, (cell, row.case, row.metric, row.arm)))

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows with each decision, in the order of :class:`ReplicationWord`."""
        found = Counter(row.verdict for row in self.rows)
        return {word.value: found[word.value] for word in ReplicationWord if found[word.value]}

    @property
    def answer(self) -> str:
        counts = ", ".join(f"{count} {word}" for word, count in self.counts.items())
        same = "" if not self.changes else f" (another question: {', '.join(self.changes)})"
        return f"{counts or 'no row'}{same}"

    def to_json(self) -> dict[str, Any]:
        return fields_to_json(self)

    @classmethod
    def read(cls, path: StudyPath) -> Replication:
        """Read a ``replication.json``, maybe of anybody; raise ``RecordError`` if it is none."""
        data = read_json(path)
        try:
            read = from_json(cls, data)
            _check(read)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{path} is not a valid replication: {error}") from None
        return read


def _check(read: Replication) -> None:
    """Raise an error unless texts are texts, numbers numbers, and verdicts known words."""
    for row in read.rows:
        ReplicationWord(row.verdict)
    texts: list[Any] = [read.question, *read.changes, *read.differences, read.package_versions]
    owners: tuple[ReplicationSide | ReplicatedRow, ...] = (read.author, read.reader, *read.rows)
    for owner in owners:
        owner_texts = (f.name for f in fields(owner) if f.type == "str")
        texts += [getattr(owner, name) for name in owner_texts]
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None or not (read.author.machine_text and read.reader.machine_text):
        raise ValueError(f"{wrong!r} is not a text")
