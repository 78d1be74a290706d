"""Composition of cells: a question, its arms and what they claim, checked before any run starts.

In: composed configs (:mod:`labkit.experiment.hydra`). Out:
:class:`labkit.experiment.cell.ReadyCell`.
"""
