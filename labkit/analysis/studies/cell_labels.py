"""Labels of a study's cells: the overrides in which each cell differs from the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.config.sweep import short_names
from labkit.records import PROCESSES_SUFFIX


def cell_labels(analyses: Sequence[CellAnalysis], ignore: Collection[str] = ()) -> list[str]:
    """Return a label for each cell, such as ``rate=2``, without the options in ``ignore``.

    If there is only one cell, its label has all its overrides. A cell of an earlier version of
    labkit, which did not list the overrides, is labelled by its name.
    """
    listed = [
        [override for override in _overrides(analysis) if override.partition("=")[0] not in ignore]
        for analysis in analyses
    ]
    if len(analyses) == 1:
        return [", ".join(listed[0]) or analyses[0].name]
    common = set.intersection(*map(set, listed))
    varying = [[o for o in overrides if o not in common] for overrides in listed]
    keys = dict.fromkeys(o.partition("=")[0] for overrides in varying for o in overrides)
    short = short_names(list(keys))
    return [
        _label(overrides, short, analysis)
        for overrides, analysis in zip(varying, analyses, strict=True)
    ]


def _overrides(analysis: CellAnalysis) -> list[str]:
    return list(analysis.data.manifest.get("overrides") or [analysis.name])


def _label(overrides: Sequence[str], short: dict[str, str], analysis: CellAnalysis) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{short[key]}{equals}{value}" for key, equals, value in pairs]
    if analysis.data.dir.name.endswith(PROCESSES_SUFFIX):
        words.append("in separate processes")
    return ", ".join(words) or "as configured"
