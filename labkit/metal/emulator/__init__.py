"""Runs Metal kernels on the CPU: the text that MLX generates, compiled as C++.

The emulator tests logic. It detects races, accesses out of bounds, divergence, undefined
behaviour and wrong results. It cannot tell whether Metal accepts the text, nor Metal's speed and
rounding, so its results are called *emulated*, never verified on Metal.

A kernel runs in a process of its own. Each thread is a fiber, and a simdgroup's fibers run in
lockstep. Buffers and threadgroup arrays end at guard pages and start as garbage, UBSan checks
every operation, and ``fast::`` functions reject infinities and NaN.
"""
