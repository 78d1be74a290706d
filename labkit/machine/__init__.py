"""The machine: snapshots, memory, limits, BLAS, caches, and the processes that labkit starts.

The package imports no other package of labkit.
"""
