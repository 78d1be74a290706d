"""The table of attainable and attained rates: prefix hits, accepted drafts and padding, by arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.analysis.document.report_parts import table_section
from labkit.analysis.document.table_model import Column, Table, if_known
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.robustness.hit_and_acceptance_rates import (
    AttainedRates,
    hit_and_acceptance_rates,
)
from labkit.records import Record


def _hit_and_acceptance_table(cell: Cell, records: Sequence[Record]) -> Table[AttainedRates] | None:
    """Return every arm's attainable and attained rates, or None if the records have none."""
    rates = hit_and_acceptance_rates(cell.real_arms, records)
    if not rates:
        return None
    columns = [
        _share_column("prefix hits attainable", lambda arm: arm.attainable_hits, rates),
        _share_column("attained", lambda arm: arm.hits, rates),
        _share_column("drafts accepted", lambda arm: arm.accepted, rates),
        _share_column("padding of one rectangle", lambda arm: arm.rectangle, rates),
        _share_column("rows of padding", lambda arm: arm.padded, rates),
    ]
    name = Column[AttainedRates]("arm", lambda arm: arm.arm, numeric=False)
    notes = [f"Disagreement: {line}." for arm in rates for line in arm.impossible_counts()]
    if any(arm.hits is not None for arm in rates):
        notes.append(
            "Attainable: the prompt tokens that an unlimited cache would hit. They are the whole "
            "blocks that a prompt shares with the start of an earlier, finished prompt; one that "
            "repeats an earlier answer can hit more."
        )
    if any(arm.rectangle is not None for arm in rates):
        notes.append(
            "One rectangle: all requests in one batch, each padded to the longest prompt plus the "
            "longest answer. Rows that wait while other prompts are computed are further padding."
        )
    shown = tuple(column for column in columns if column is not None)
    return Table((name, *shown), tuple(rates), tuple(notes))


hit_and_acceptance_section = table_section(
    "Attainable and attained rates", _hit_and_acceptance_table
)


def _share_column(
    heading: str, share: Callable[[AttainedRates], float | None], rates: Sequence[AttainedRates]
) -> Column[AttainedRates] | None:
    """Return a column of percentages, or None if no arm has a value for it."""
    if all(share(arm) is None for arm in rates):
        return None
    return Column(heading, share, if_known("{:.1%}".format))
