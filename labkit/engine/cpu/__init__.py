"""The kernels of the CPU, as numba compiles them.

``simd`` writes vector instructions, for the registers that ``registers`` finds. On it stand
the layers' kernels (``gemm`` and ``linear``, ``norms``, ``activations``, ``rope``) and paged
attention: ``decode_attention`` and ``tiled_attention`` compute a unit of work, ``launches`` deal
units out to the threads, ``arguments`` packs what they read.

Importing this package imports neither MLX nor numba.
"""
