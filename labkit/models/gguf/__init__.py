"""GGUF files, read with NumPy alone and written as directories that ``mlx_lm.load`` accepts.

The file is not trusted: every length, offset and shape is checked against the file before
it is used, nothing in it is executed, and whatever is wrong is one line (``GGUFError``). mlx
has a reader too, but what plans a study never imports mlx.
"""

from labkit.models.gguf.gguf_header import GGUFError

__all__ = ["GGUFError"]
