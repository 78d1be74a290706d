"""The ideal beside the achieved: prefix hits, accepted drafts and padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.analysis.attained_rates import AttainedRates, attained_rates
from labkit.analysis.rendering.tables import Column, Table
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record

Json = Mapping[str, Any]


def attained_rates_table(cell: Json, records: Sequence[Record]) -> Table[AttainedRates] | None:
    """Lay out what arms could reach and did; None where none has anything of the kind."""
    found = attained_rates(real_arms(cell), records)
    if not found:
        return None
    columns = [
        _column("prefix hits allowed", lambda one: one.hits_allowed, found),
        _column("reached", lambda one: one.hits, found),
        _column("drafts accepted", lambda one: one.accepted, found),
        _column("padding of one rectangle", lambda one: one.rectangle, found),
        _column("rows of padding", lambda one: one.padded, found),
    ]
    name = Column[AttainedRates]("arm", lambda one: one.arm, number=False)
    notes = [f"Disagreement: {line}." for one in found for line in one.disagreements()]
    if any(one.hits is not None for one in found):
        notes.append(
            "Allowed: prompt tokens in whole blocks with which an earlier prompt begins, if all "
            "before it were done and nothing was ever dropped."
        )
    if any(one.rectangle is not None for one in found):
        notes.append(
            "One rectangle: all requests, each as long as the longest prompt and longest answer. "
            "Rows that wait for others' prompts are padding too, and in no rectangle."
        )
    kept = tuple(column for column in columns if column is not None)
    return Table((name, *kept), tuple(found), tuple(notes))


def _column(
    heading: str, value: Callable[[AttainedRates], float | None], found: Sequence[AttainedRates]
) -> Column[AttainedRates] | None:
    if all(value(one) is None for one in found):
        return None
    return Column(heading, value, lambda share: "" if share is None else f"{share:.1%}")
