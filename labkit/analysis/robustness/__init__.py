"""What could weaken a cell's result: noise, hosts, stalls, isolation, and the checks of each.

In: a cell's analysis. Out: caveats, disturbed blocks, and the results of other analyses.
"""
