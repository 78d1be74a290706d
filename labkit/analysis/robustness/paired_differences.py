"""The differences between an arm and the baseline within each block, and how much runs vary.

A verdict rests on these differences. What the machine does in a block affects all arms of the
block, so the differences vary much less than the runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.comparison.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.number_format import magnitude_text


@dataclass(frozen=True)
class PairedDifferences:
    """An arm's differences from the baseline in one row.

    ``by_block`` holds the difference in each complete block, in percent. It comes from the mean log
    values of the arm's and the baseline's runs, or from the median over rounds if arms were
    interleaved.
    """

    arm: str
    by_block: dict[int, float]


def paired_differences(
    row: MetricRow, arm: str, baseline: str, runs: int
) -> PairedDifferences | None:
    """Return an arm's differences by block, or None if no block has comparable values.

    ``runs``: the number of runs of each arm in a complete block.
    """
    row = row.pair(baseline, arm)
    if row.metric is None or row.skipped is not None or row.is_computed or not row.comparable:
        return None
    blocks = complete_blocks(row, (baseline, arm), runs)
    if not blocks:
        return None
    base, other = (log_values(row, name, blocks).mean(axis=1) for name in (baseline, arm))
    differences = map(row.to_percent, map(float, other - base))
    return PairedDifferences(arm, dict(zip(blocks, differences, strict=True)))


def variation_sentence(row: MetricRow, baseline: str, pairs: PairedDifferences) -> str | None:
    """Return a sentence with the range of the baseline's runs and the range of the differences.

    None if there are fewer than two blocks, or a run of the baseline has the value 0.
    """
    values = [run.value for run in row.arms.get(baseline, ())]
    differences = pairs.by_block.values()
    if len(values) < 2 or len(differences) < 2 or min(values) <= 0.0:
        return None
    runs_pct = 100.0 * (max(values) / min(values) - 1.0)
    points = max(differences) - min(differences)
    return (
        f"runs of {baseline} lie up to {magnitude_text(runs_pct)} % apart, the differences of "
        f"{pairs.arm} within blocks {magnitude_text(points)} points"
    )
