"""The Metal attention kernels, their launch through MLX, and their emulator.

``labkit.metal.launch`` runs them on a Mac (``metal``) or emulated on the CPU
(``emulated``); importing this package imports neither MLX nor a compiler.
"""
