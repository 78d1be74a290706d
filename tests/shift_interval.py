"""The interval of a single row, against which tests compare those of families of rows."""

from labkit.analysis.statistics.hodges_lehmann import breakpoints
from labkit.analysis.statistics.permutation_test import pool_by_block, relabellings


def confidence_interval(baseline, arm, alpha=0.05):
    """Return the interval of the shift from one array [blocks, runs] to the other, or None."""
    labels = relabellings(*baseline.shape)
    values = labels.mean_differences(pool_by_block(baseline, arm))
    return breakpoints(values, labels.label_correlation).interval(alpha)
