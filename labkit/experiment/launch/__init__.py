"""Launches of runs: worker processes are started, watched, given turns and ended.

In: the runs of a block. Out: their records, or records of how they failed.
"""
