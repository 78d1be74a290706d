"""Facts of the machine: fingerprint, probe, limits, memory, threads, BLAS, caches.

Imports nothing else of labkit.
"""
