"""The Metal attention kernels, how a call of one is run, and their emulator.

``labkit.engine.attention.metal_backend`` launches them, on a Mac (``metal``) or emulated on the CPU
(``emulated``); importing this package imports neither MLX nor a compiler.
"""
