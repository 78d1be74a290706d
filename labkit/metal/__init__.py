"""The Metal attention kernels, the executors of a kernel call, and the emulator.

``labkit.engine.attention.metal_backend`` launches the kernels, on a Mac (``metal``) or on the CPU
(``emulated``). Importing this package imports neither MLX nor a compiler.
"""
