"""Processes that labkit starts: limits, placement, supervision, and an end that nothing survives.

In: commands and process ids. Out: processes that stop, continue and die as they are meant to.
"""
