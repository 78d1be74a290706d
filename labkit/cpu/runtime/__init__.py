"""What every kernel is compiled with and runs on: numba's decorators and cache, memory, threads.

In: Python functions. Out: compiled functions, cached on disk, that share one pool of threads.
"""
