"""What differs by machine: caches, BLAS, threads, memory. Imports nothing of labkit."""
