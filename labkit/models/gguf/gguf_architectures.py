"""The supported architectures: their tensors in GGUF and in mlx_lm, and their config.json.

The names of tensors in GGUF are those of llama.cpp's ``gguf-py/gguf/tensor_mapping.py``; the names
of parameters are those of ``mlx_lm.models``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from labkit.models.gguf.gguf_header import GGUFError, GGUFFile


@dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """The properties in which the supported architectures differ.

    ``interleaved``: whether the file orders query and key rows for RoPE over neighbouring pairs;
    mlx_lm expects the order for RoPE over the two halves of a head. ``biases``: whether the query,
    key and value projections have biases. ``head_norms``: whether queries and keys are normalized
    per head. ``free_head_dim``: whether mlx_lm accepts a head dimension other than hidden size
    divided by heads.
    """

    interleaved: bool = False
    biases: bool = False
    head_norms: bool = False
    free_head_dim: bool = True


# By the architecture's name, which is the same in GGUF and in mlx_lm.
ARCHITECTURE_TRAITS = {
    "llama": ArchitectureTraits(interleaved=True),
    "qwen2": ArchitectureTraits(biases=True, free_head_dim=False),
    "qwen3": ArchitectureTraits(head_norms=True),
}
# Keys that would change the computation, with the only supported value: the one without effect.
REQUIRED_DEFAULTS: dict[str, Any] = {
    "expert_count": 0,
    "rope.scaling.type": "none",
    "rope.scale_linear": 1.0,
    "attention.sliding_window": 0,
}
MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class TargetParameter:
    """The mlx_lm parameter that a tensor is converted to.

    ``path``: the parameter's name without ``.weight``. ``interleaved_heads``: the number of heads
    if the tensor's rows are in interleaved order (see ``ArchitectureTraits``), else None.
    """

    path: str
    shape: tuple[int, ...]
    interleaved_heads: int | None = None


@dataclass(frozen=True)
class GGUFArchitecture:
    """A model's architecture and dimensions, from the metadata of its file.

    ``tied``: whether the file has no output matrix, so that the embedding is used instead.
    """

    name: str
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    epsilon: float
    theta: float
    tied: bool

    @property
    def traits(self) -> ArchitectureTraits:
        """The properties of this architecture."""
        return ARCHITECTURE_TRAITS[self.name]

    def targets(self) -> dict[str, TargetParameter]:
        """Return the mlx_lm parameter of each tensor that the file must have, by tensor name."""
        targets = {
            "token_embd.weight": TargetParameter("model.embed_tokens", (self.vocab, self.hidden)),
            "output_norm.weight": TargetParameter("model.norm", (self.hidden,)),
        }
        if not self.tied:
            targets["output.weight"] = TargetParameter("lm_head", (self.vocab, self.hidden))
        for layer in range(self.layers):
            for name, target in self._layer().items():
                path = f"model.layers.{layer}.{target.path}"
                targets[f"blk.{layer}.{name}"] = TargetParameter(
                    path, target.shape, target.interleaved_heads
                )
        return targets

    def _layer(self) -> dict[str, TargetParameter]:
        hidden, inner = (self.hidden,), (self.inner,)
        queries, keys = (self.heads * self.head_dim,), (self.kv_heads * self.head_dim,)
        interleaved = self.traits.interleaved
        targets = {
            "attn_norm.weight": TargetParameter("input_layernorm", hidden),
            "attn_q.weight": TargetParameter(
                "self_attn.q_proj", queries + hidden, self.heads if interleaved else None
            ),
            "attn_k.weight": TargetParameter(
                "self_attn.k_proj", keys + hidden, self.kv_heads if interleaved else None
            ),
            "attn_v.weight": TargetParameter("self_attn.v_proj", keys + hidden),
            "attn_output.weight": TargetParameter("self_attn.o_proj", hidden + queries),
            "ffn_norm.weight": TargetParameter("post_attention_layernorm", hidden),
            "ffn_gate.weight": TargetParameter("mlp.gate_proj", inner + hidden),
            "ffn_up.weight": TargetParameter("mlp.up_proj", inner + hidden),
            "ffn_down.weight": TargetParameter("mlp.down_proj", hidden + inner),
        }
        if self.traits.biases:
            targets["attn_q.bias"] = TargetParameter("self_attn.q_proj", queries)
            targets["attn_k.bias"] = TargetParameter("self_attn.k_proj", keys)
            targets["attn_v.bias"] = TargetParameter("self_attn.v_proj", keys)
        if self.traits.head_norms:
            targets["attn_q_norm.weight"] = TargetParameter("self_attn.q_norm", (self.head_dim,))
            targets["attn_k_norm.weight"] = TargetParameter("self_attn.k_norm", (self.head_dim,))
        return targets

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, without the keys for quantisation and tokens."""
        return {
            "model_type": self.name,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
        }


def read_architecture(file: GGUFFile) -> GGUFArchitecture:
    """Return the architecture of a file, and check that the file has exactly its tensors.

    Raises
    ------
    GGUFError
        The architecture is not supported, or the tensors do not match the metadata.
    """
    name = file.string("general.architecture")
    if name not in ARCHITECTURE_TRAITS:
        raise GGUFError(
            f"architecture {name!r} is not supported; must be one of: "
            f"{', '.join(ARCHITECTURE_TRAITS)}"
        )
    _check_required_defaults(file, name)
    heads = file.count(f"{name}.attention.head_count")
    hidden = file.count(f"{name}.embedding_length")
    default_dim = hidden // max(heads, 1)
    head_dim = file.count(f"{name}.attention.key_length", default_dim)
    architecture = GGUFArchitecture(
        name=name,
        hidden=hidden,
        layers=file.count(f"{name}.block_count"),
        inner=file.count(f"{name}.feed_forward_length"),
        heads=heads,
        kv_heads=file.count(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=len(file.strings("tokenizer.ggml.tokens")),
        context=file.count(f"{name}.context_length"),
        epsilon=float(file.number(f"{name}.attention.layer_norm_rms_epsilon")),
        theta=float(file.number(f"{name}.rope.freq_base", 10_000.0)),
        tied="output.weight" not in file.tensors,
    )
    _check_dimensions(file, architecture, default_dim)
    _check_tensors(file, architecture)
    return architecture


def _check_required_defaults(file: GGUFFile, name: str) -> None:
    for key, default in REQUIRED_DEFAULTS.items():
        value = file.metadata.get(f"{name}.{key}", default)
        if isinstance(value, np.ndarray) or value != default:
            raise GGUFError(f"{name}.{key} is {value}; only {default} is supported")
    if file.count("split.count", 1) > 1:
        raise GGUFError(
            "the file is one part of a split model; merge the parts (llama-gguf-split --merge)"
        )


def _check_dimensions(file: GGUFFile, a: GGUFArchitecture, default_dim: int) -> None:
    numbers = (a.hidden, a.layers, a.inner, a.heads, a.kv_heads, a.head_dim, a.vocab, a.context)
    if 0 in numbers or a.layers > MAX_LAYERS or a.heads % a.kv_heads or a.head_dim % 2:
        raise GGUFError(
            f"invalid dimensions (hidden {a.hidden}, {a.layers} layers, {a.heads} query and "
            f"{a.kv_heads} KV heads of {a.head_dim}, {a.vocab} tokens)"
        )
    if not (0 < a.epsilon < inf and 0 < a.theta < inf):
        raise GGUFError(
            f"RMS norm epsilon is {a.epsilon} and RoPE base is {a.theta}; both must be finite and "
            "above 0"
        )
    for key in (f"{a.name}.attention.value_length", f"{a.name}.rope.dimension_count"):
        if file.count(key, a.head_dim) != a.head_dim:
            raise GGUFError(
                f"{key} is {file.count(key)}; it must equal the head dimension {a.head_dim}"
            )
    if not a.traits.free_head_dim and a.head_dim != default_dim:
        raise GGUFError(
            f"the head dimension is {a.head_dim}, but mlx_lm's {a.name} requires {default_dim}"
        )


def _check_tensors(file: GGUFFile, architecture: GGUFArchitecture) -> None:
    targets = architecture.targets()
    for name, target in targets.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise GGUFError(f"tensor {name} is missing")
        if tensor.shape != target.shape:
            raise GGUFError(f"tensor {name} has shape {tensor.shape}, expected {target.shape}")
    for name in file.tensors:
        if name not in targets:
            raise GGUFError(f"tensor {name}: mlx_lm's {architecture.name} has no such parameter")
