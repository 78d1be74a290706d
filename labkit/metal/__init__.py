"""The Metal attention kernels, the executors of a kernel call, and the emulator.

``labkit.engine.attention.backends.metal_backend`` launches the kernels: on a Mac (``metal``), on
the CPU (``emulated``), or as CUDA on an NVIDIA GPU (``cuda``). Importing this package imports
neither MLX nor a compiler.
"""
