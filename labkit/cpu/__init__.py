"""The kernels of the CPU, as numba compiles them.

``simd`` writes vector instructions, and ``registers`` knows how many numbers this CPU's hold. On
them stand the matrix products (``products``, ``gemm``, ``linear``; ``stored`` and
``stored_product`` for weights as they lie) and paged attention: ``decode_attention`` and
``tiled_attention`` compute a unit of work, ``launches`` deals units out to the threads,
``arguments`` packs what they read. ``norms``, ``activations`` and ``rope`` are loops that numba
vectorises.

Importing this package imports neither MLX nor numba.
"""
