"""From a cell's records to its rows, gates, comparisons and verdicts.

In: the records and arms of one cell. Out: a
:class:`labkit.analysis.comparison.cell_analysis.CellAnalysis`, whose ``cell`` is the model.
"""
