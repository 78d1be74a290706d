"""The tables of a report, each declared once, with the section that shows it.

In: the model of a cell, or its records. Out: :class:`labkit.analysis.document.table_model.Table`.
"""
