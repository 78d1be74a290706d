"""One typed model of a study: ``Study > Cell > Row > Comparison``.

In: the records' analysis, which builds each :class:`.cell_model.Cell` once, or a ``cell.json``.
Out: frozen parts that every table, chart, sentence, export and comparison of studies reads.
"""
