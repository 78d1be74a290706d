"""The schedule of a cell: its plan, its blocks, the looks taken, and the locks around its runs.

In: a cell. Out: runs in their random order, handed to :mod:`labkit.experiment.launch`, until the
cell is complete or decided.
"""
