"""Labels of a study's cells: the options in which they differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from labkit.config.sweep import short_names
from labkit.records import PROCESSES_SUFFIX

if TYPE_CHECKING:
    from labkit.analysis.studies.study_cell import StudyCell


def cell_labels(cells: Sequence[StudyCell], ignore: Collection[str] = ()) -> list[str]:
    """Return a label for each cell, such as ``rate=2``, without the options in ``ignore``.

    If there is only one cell, its label has all its overrides. A cell of an earlier version of
    labkit, which did not list the overrides, is labelled by its name.
    """
    listed = [
        [override for override in cell.overrides if override.partition("=")[0] not in ignore]
        for cell in cells
    ]
    if len(cells) == 1:
        return [", ".join(listed[0]) or cells[0].name]
    common = set.intersection(*map(set, listed))
    varying = [[o for o in overrides if o not in common] for overrides in listed]
    keys = dict.fromkeys(o.partition("=")[0] for overrides in varying for o in overrides)
    short = short_names(list(keys))
    return [
        _label(overrides, short, cell.folder)
        for overrides, cell in zip(varying, cells, strict=True)
    ]


def _label(overrides: Sequence[str], short: dict[str, str], folder: str) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{short[key]}{equals}{value}" for key, equals, value in pairs]
    if folder.endswith(PROCESSES_SUFFIX):
        words.append("in separate processes")
    return ", ".join(words) or "as configured"
