"""Read GGUF files with NumPy alone, and convert them to directories that ``mlx_lm.load`` accepts.

The file is not trusted: every length, offset and shape is checked against the file before it is
used, nothing in it is executed, and any defect is reported in one line (``GGUFError``). mlx has a
reader too, but the process that plans a study never imports mlx.
"""

from labkit.models.gguf.gguf_header import GGUFError

__all__ = ["GGUFError"]
