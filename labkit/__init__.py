"""labkit: a laboratory for LLM inference engines on MLX."""

__version__ = "0.1.0"
