"""The fused kernels on the CPU: numba twins of the Metal kernels' structure."""
