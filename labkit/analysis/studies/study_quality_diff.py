"""How the quality of arms that score texts changed from one study to another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.analysis.comparison.cell_analysis import CellData
from labkit.analysis.comparison.text_quality import ScoredWindows, scored_windows
from labkit.analysis.findings.outputs_text import interval_text, quality_phrases
from labkit.analysis.statistics.block_jackknife import block_jackknife


def quality_change_notes(old: CellData, new: CellData) -> Iterator[str]:
    """Yield a sentence for each arm that scored texts in both studies.

    If both studies scored the same windows, the change of the mean KL divergence has an interval,
    because the windows are paired.
    """
    before, after = quality_phrases(old), quality_phrases(new)
    for arm in [arm for arm in before if arm in after]:
        windows = [scored_windows(arm, data.records) for data in (old, new)]
        yield (
            f"Quality of {arm} against {old.baseline}: old {before[arm]}; new {after[arm]}; "
            f"{_kl_change(*windows)}."
        )


def _kl_change(old: ScoredWindows | None, new: ScoredWindows | None) -> str:
    """Return a phrase on the change of the mean KL divergence."""
    assert old is not None and new is not None, "both have a quality"
    tokens = old.tokens
    if not np.array_equal(tokens, new.tokens):
        return "the windows differ, so the change has no interval"
    change = new.kl_sums - old.kl_sums
    if not change.any():
        return "the KL divergence is the same in every window"
    interval = block_jackknife(
        lambda some: float(change[some].sum() / tokens[some].sum()), len(tokens)
    )
    return f"the KL divergence changed by {interval_text(interval)} nats"
