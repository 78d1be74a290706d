"""What is worth saying about a cell, and the sentences that say it.

In: a cell's analysis. Out: its answer, its verdicts in words, and the next command.
"""
