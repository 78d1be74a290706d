"""Replay of a captured graph: all launches of a step in one call, without Python between them.

In: a captured graph and the arrays of a step. Out: the step's outputs and its launches' counters.
"""
