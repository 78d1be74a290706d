"""The charts of a report, each declared once.

In: the model of a cell, or its records. Out: :class:`labkit.analysis.document.chart.Chart`.
"""
