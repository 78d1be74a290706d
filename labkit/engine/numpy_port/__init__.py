"""mlx_lm models on NumPy arrays, their layers as the kernels of ``labkit.engine.cpu``.

Importing this package imports neither MLX nor numba.
"""
