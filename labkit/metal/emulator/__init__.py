"""Runs Metal kernels on the CPU: the text that MLX generates, compiled as C++.

A test of logic: races, bounds, divergence, undefined behaviour and wrong results show;
whether Metal accepts the text, and its speed and rounding, do not. What comes out is
called *emulated*, never verified on Metal.

Each thread is a fiber, run in lockstep by simdgroup, in a process of its own. Buffers and
threadgroup arrays end at guard pages and begin as garbage; UBSan watches; ``fast::``
functions refuse infinities and NaN.
"""
