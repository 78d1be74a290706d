"""The machine: fingerprint, memory, limits, BLAS, caches, and the processes that labkit starts.

This package imports no other package of labkit.
"""
