"""Read GGUF files with NumPy alone, and convert them to directories that ``mlx_lm.load`` accepts.

A file is not trusted: every length, offset and shape is checked before it is used, nothing in the
file is executed, and any defect is reported in one line (``GGUFError``). MLX has a GGUF reader too,
but the process that plans a study never imports MLX.
"""

from labkit.models.gguf.gguf_header import GGUFError

__all__ = ["GGUFError"]
