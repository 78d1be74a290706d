"""Which model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from labkit.config.rules import require


class Architecture(Enum):
    """The mlx_lm model class that a built model uses."""

    qwen3 = "qwen3"


@dataclass
class ModelShape:
    """The shape of a model that labkit builds from a seed."""

    architecture: Architecture = Architecture.qwen3
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    vocab_size: int = 4096

    def __post_init__(self) -> None:
        """Check the ranges."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            require(
                not isinstance(value, int) or value >= 1,
                f"model.shape.{item.name}={value}: allowed are 1 or more",
            )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.shape.num_heads={self.num_heads} is not a multiple of "
            f"model.shape.num_kv_heads={self.num_kv_heads}",
        )
        require(
            self.vocab_size >= 512,
            f"model.shape.vocab_size={self.vocab_size}: allowed are 512 or more "
            "(256 bytes, the special tokens and some merges)",
        )


@dataclass
class Model:
    """Which model: built from ``shape`` and ``seed``, or a directory at ``path``."""

    name: str = "tiny"
    path: str | None = None
    seed: int = 0
    shape: ModelShape | None = None

    def __post_init__(self) -> None:
        """Check that there is at most one source of weights (``Experiment`` wants one)."""
        require(
            self.shape is None or self.path is None,
            f"model.path={self.path}: model={self.name} is built from a seed; "
            "use model=local model.path=DIR",
        )
