"""From GGUF metadata to mlx_lm's config.json, for each supported architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from labkit.config import count_text
from labkit.models.gguf import gguf_known_keys, gguf_rope_scaling
from labkit.models.gguf.gguf_header import GGUFError, GGUFFile
from labkit.models.gguf.gguf_tensor_names import LAYER_RULES, TensorRule

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class TargetParameter:
    """The mlx_lm parameter that a tensor is converted to.

    ``tensor``: the tensor's name in the file. ``name``: the parameter's name, for example
    ``model.norm.weight``. ``path``: the name without the suffix, ``model.norm``. ``shape``: the
    tensor's shape in the file. ``interleaved_heads``: the number of heads if the tensor's rows are
    ordered for RoPE over neighbouring pairs, else None. ``minus_one``: see ``TensorRule``.
    """

    tensor: str
    name: str
    path: str
    shape: tuple[int, ...]
    interleaved_heads: int | None = None
    minus_one: bool = False


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a model. A dense model has 0 for the sizes of experts.

    ``rotated``: the dimensions of a head that RoPE rotates. ``window``: the sliding window in
    tokens, 0 without one. ``context``: the trained context in tokens.
    """

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    vocab: int
    context: int
    window: int
    experts: int
    used_experts: int
    expert_inner: int
    shared_inner: int

    def size_of(self, name: str) -> int:
        """Return a dimension's size. ``name``: one from ``TensorRule.shape``, else a field's."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        products = {
            "twice inner": 2 * self.inner,
            "queries": queries,
            "keys": keys,
            "queries, keys, values": queries + 2 * keys,
        }
        return products[name] if name in products else int(getattr(self, name))


@dataclass(frozen=True)
class GGUFArchitecture:
    """A model's architecture, from the metadata of its file."""

    name: str  # the architecture's name in GGUF
    model_type: str  # the name of mlx_lm's class, as in config.json
    sizes: Dimensions  # the model's dimensions
    epsilon: float  # the epsilon of RMS norms
    # theta, rope_scaling: the base of RoPE's frequencies, and ``rope_scaling`` of config.json.
    theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool  # whether the file has no output matrix, so that the embedding is used instead
    # The optional biases that the file has: ``attention_bias``, ``mlp_bias``.
    biases: frozenset[str]
    settings: dict[str, Any]  # the keys of config.json that only this architecture has

    def targets(self) -> Iterator[TargetParameter]:
        """Yield the mlx_lm parameters of the tensors that the file may have.

        The embedding tensor is yielded twice if the file has no output matrix and mlx_lm's class
        cannot use the embedding as output.
        """
        traits, sizes = TRAITS[self.model_type], self.sizes
        heads = {"self_attn.q_proj": sizes.heads, "self_attn.k_proj": sizes.kv_heads}
        interleaved = heads if traits.interleaved else {}
        table = (sizes.vocab, sizes.hidden)

        def matrix(tensor: str, path: str) -> TargetParameter:
            return TargetParameter(tensor, f"{path}.weight", path, table)

        yield matrix("token_embd.weight", "model.embed_tokens")
        yield TargetParameter(
            "output_norm.weight",
            "model.norm.weight",
            "model.norm",
            (sizes.hidden,),
            minus_one=traits.norms_minus_one,
        )
        if not self.tied:
            yield matrix("output.weight", "lm_head")
        elif not traits.can_tie:
            yield matrix("token_embd.weight", "lm_head")
        for layer in range(sizes.layers):
            for rule in self.rules():
                path = f"model.layers.{layer}."
                yield TargetParameter(
                    f"blk.{layer}.{rule.tensor}",
                    path + rule.name,
                    path + rule.parameter,
                    tuple(map(sizes.size_of, rule.shape)),
                    interleaved.get(rule.parameter),
                    rule.minus_one,
                )

    def rules(self) -> list[TensorRule]:
        """Return the rules of a layer's tensors, without optional groups that the file lacks."""
        return [
            rule
            for rule in LAYER_RULES[self.model_type]
            if not rule.optional or rule.optional in self.biases
        ]

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, without the keys for quantisation and tokens."""
        sizes = self.sizes
        common = {
            "model_type": self.model_type,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "intermediate_size": sizes.inner,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocab,
            "hidden_act": "silu",
            "max_position_embeddings": sizes.context,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tied,
            "attention_bias": "attention_bias" in self.biases or self.model_type == "qwen2",
            "mlp_bias": "mlp_bias" in self.biases,
        }
        return {**common, **self.settings}


Settings = Callable[[GGUFFile, str, Dimensions], dict[str, Any]]


def _mixtral(_file: GGUFFile, _name: str, sizes: Dimensions) -> dict[str, Any]:
    return {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.used_experts}


def _qwen_moe(_file: GGUFFile, _name: str, sizes: Dimensions) -> dict[str, Any]:
    return {
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.used_experts,
        "moe_intermediate_size": sizes.expert_inner,
        "shared_expert_intermediate_size": sizes.shared_inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gemma_scale(sizes: Dimensions, layers_of_27b: int) -> dict[str, Any]:
    """Return Gemma's attention scale, which depends on ``head_dim`` except in the 27B models."""
    of_27b = sizes.layers == layers_of_27b
    return {"query_pre_attn_scalar": sizes.hidden // sizes.heads if of_27b else sizes.head_dim}


def _gemma2(file: GGUFFile, name: str, sizes: Dimensions) -> dict[str, Any]:
    return {
        **_gemma_scale(sizes, 46),
        "attn_logit_softcapping": float(file.number(f"{name}.attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(file.number(f"{name}.final_logit_softcapping", 30.0)),
    }


def _gemma3(file: GGUFFile, name: str, sizes: Dimensions) -> dict[str, Any]:
    if file.number(f"{name}.final_logit_softcapping", 0.0) != 0:
        raise GGUFError(
            f"{name}.final_logit_softcapping is set; mlx_lm's class does not have this option"
        )
    period = _full_layer_period(file, f"{name}.attention.sliding_window_pattern", 6)
    return {
        **_gemma_scale(sizes, 62),
        "sliding_window": sizes.window or sizes.context,
        "sliding_window_pattern": period if sizes.window else 1,
        "rope_local_base_freq": float(file.number(f"{name}.rope.freq_base_swa", 10_000.0)),
    }


def _phi3(file: GGUFFile, name: str, sizes: Dimensions) -> dict[str, Any]:
    original = file.count(f"{name}.rope.scaling.original_context_length", sizes.context)
    return {
        "partial_rotary_factor": sizes.rotated / sizes.head_dim,
        "original_max_position_embeddings": original,
    }


def _granite(file: GGUFFile, name: str, sizes: Dimensions) -> dict[str, Any]:
    return {
        "attention_multiplier": float(file.number(f"{name}.attention.scale", sizes.head_dim**-0.5)),
        "embedding_multiplier": float(file.number(f"{name}.embedding_scale", 1.0)),
        "residual_multiplier": float(file.number(f"{name}.residual_scale", 1.0)),
        "logits_scaling": float(file.number(f"{name}.logit_scale", 1.0)),
    }


def _glm4(_file: GGUFFile, _name: str, sizes: Dimensions) -> dict[str, Any]:
    return {"partial_rotary_factor": sizes.rotated / sizes.head_dim, "rope_traditional": True}


def _alternating(every: int) -> Settings:
    """Return the settings of a model whose ``every``-th layer, unless the file differs, is full."""

    def settings(file: GGUFFile, name: str, sizes: Dimensions) -> dict[str, Any]:
        key = f"{name}.attention.sliding_window_pattern"
        if isinstance(file.metadata.get(key), np.ndarray):
            windowed = [bool(layer) for layer in file.metadata[key]]
        else:
            period = _full_layer_period(file, key, every)
            windowed = [(layer + 1) % period != 0 for layer in range(sizes.layers)]
        if len(windowed) != sizes.layers:
            raise GGUFError(
                f"{key} has {len(windowed)} entries for {count_text(sizes.layers, 'layer')}"
            )
        kinds = ["sliding_attention" if one else "full_attention" for one in windowed]
        return {"sliding_window": sizes.window, "layer_types": kinds}

    return settings


def _full_layer_period(file: GGUFFile, key: str, default: int) -> int:
    """Return how often a layer without a window follows. llama.cpp's 0 (never) is refused."""
    period = file.count(key, default)
    if period == 0:
        raise GGUFError(f"{key} is 0; it must be 1 or more")
    return period


def _gpt_oss(file: GGUFFile, name: str, sizes: Dimensions) -> dict[str, Any]:
    return {
        **_mixtral(file, name, sizes),
        **_alternating(2)(file, name, sizes),
        "intermediate_size": sizes.expert_inner,
    }


@dataclass(frozen=True, slots=True)
class ClassTraits:
    """The properties in which mlx_lm's classes, and the files for them, differ.

    ``interleaved``: whether the file orders query and key rows for RoPE over neighbouring pairs,
    while mlx_lm expects the order for RoPE over the two halves of a head. ``free_head_dim``:
    whether mlx_lm accepts a head dimension other than hidden size divided by heads. ``can_tie``:
    whether the class may use the embedding as output. ``norms_minus_one``: see ``TensorRule``.
    ``partial``: whether RoPE may rotate a part of a head. ``scaling``: the types of RoPE scaling
    that the class computes. ``windows``: how a file's sliding window is converted: ``layers`` (to a
    setting of the class), ``context`` (mlx_lm's class has no window, so the context is cut to the
    window) or ``ignored`` (llama.cpp ignores it for these models too). ``settings``: the class's
    own keys of config.json.
    """

    interleaved: bool = False
    free_head_dim: bool = True
    can_tie: bool = True
    norms_minus_one: bool = False
    partial: bool = False
    scaling: tuple[str, ...] = ()
    windows: str = "context"
    settings: Settings | None = None


ALL_SCALINGS = ("linear", "yarn", "llama3")
TRAITS = {
    "llama": ClassTraits(interleaved=True, scaling=ALL_SCALINGS),
    "mixtral": ClassTraits(interleaved=True, free_head_dim=False, settings=_mixtral),
    "qwen2": ClassTraits(free_head_dim=False, scaling=ALL_SCALINGS),
    "qwen3": ClassTraits(scaling=ALL_SCALINGS),
    "qwen2_moe": ClassTraits(free_head_dim=False, can_tie=False, settings=_qwen_moe),
    "qwen3_moe": ClassTraits(settings=_qwen_moe),
    "gemma2": ClassTraits(norms_minus_one=True, settings=_gemma2),
    "gemma3_text": ClassTraits(
        norms_minus_one=True, scaling=("linear",), windows="layers", settings=_gemma3
    ),
    "phi3": ClassTraits(
        free_head_dim=False, partial=True, scaling=("longrope",), windows="ignored", settings=_phi3
    ),
    "granite": ClassTraits(
        interleaved=True, free_head_dim=False, scaling=ALL_SCALINGS, settings=_granite
    ),
    "smollm3": ClassTraits(interleaved=True, scaling=ALL_SCALINGS),
    "olmo2": ClassTraits(scaling=ALL_SCALINGS),
    "olmo3": ClassTraits(scaling=ALL_SCALINGS, windows="layers", settings=_alternating(4)),
    "glm4": ClassTraits(can_tie=False, partial=True, settings=_glm4),
    "gpt_oss": ClassTraits(
        can_tie=False, scaling=ALL_SCALINGS, windows="layers", settings=_gpt_oss
    ),
}
# The name of mlx_lm's class by the architecture's name in GGUF. Two exceptions: a llama file with
# experts is a mixtral model, and an olmo2 file with a sliding window is an olmo3 model.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "glm4": "glm4",
    "gpt-oss": "gpt_oss",
}


def read_architecture(file: GGUFFile) -> GGUFArchitecture:
    """Return the architecture of a file, and check that the file has exactly its tensors.

    Raises ``GGUFError`` if the architecture is not supported, or the tensors do not match the
    metadata.
    """
    name = file.string("general.architecture")
    if name not in MODEL_TYPES:
        raise GGUFError(
            f"architecture {name!r} is not supported; must be one of: {', '.join(MODEL_TYPES)}"
        )
    if file.count("split.count", 1) > 1:
        raise GGUFError(
            "the file is one part of a split model; merge the parts (llama-gguf-split --merge)"
        )
    sizes = _read_dimensions(file, name)
    model_type = _model_type(name, sizes)
    traits = TRAITS[model_type]
    theta = float(file.number(f"{name}.rope.freq_base", 10_000.0))
    epsilon = float(file.number(f"{name}.attention.layer_norm_rms_epsilon"))
    _check_dimensions(file, name, model_type, sizes)
    if not (0 < epsilon < inf and 0 < theta < inf):
        raise GGUFError(
            f"RMS norm epsilon is {epsilon} and RoPE base is {theta}; both must be finite and "
            "above 0"
        )
    if traits.windows == "context" and sizes.window:
        sizes = replace(sizes, context=min(sizes.context, sizes.window))
    scaling = gguf_rope_scaling.read_rope_scaling(file, name, theta, sizes.rotated)
    if traits.windows == "context" and sizes.window and scaling and scaling["type"] == "yarn":
        raise GGUFError(
            f"{name}.attention.sliding_window is {sizes.window}: mlx_lm's {model_type} has no "
            "sliding window, and YaRN extends the context beyond it"
        )
    _check_keys(file, name, model_type, sizes, theta)
    if scaling is not None and scaling["rope_type"] not in traits.scaling:
        raise GGUFError(
            f"RoPE scaling of type {scaling['rope_type']}: mlx_lm's {model_type} has no such "
            "scaling"
        )
    architecture = GGUFArchitecture(
        name=name,
        model_type=model_type,
        sizes=sizes,
        epsilon=epsilon,
        theta=theta,
        rope_scaling=scaling,
        tied="output.weight" not in file.tensors,
        biases=frozenset(
            rule.optional
            for rule in LAYER_RULES[model_type]
            if rule.optional and f"blk.0.{rule.tensor}" in file.tensors
        ),
        settings=traits.settings(file, name, sizes) if traits.settings else {},
    )
    _check_tensors(file, architecture)
    return architecture


def _model_type(name: str, sizes: Dimensions) -> str:
    model_type = MODEL_TYPES[name]
    if model_type == "llama" and sizes.experts:
        return "mixtral"
    return "olmo3" if model_type == "olmo2" and sizes.window else model_type


def _read_dimensions(file: GGUFFile, name: str) -> Dimensions:
    heads = file.count(f"{name}.attention.head_count")
    hidden = file.count(f"{name}.embedding_length")
    inner = file.count(f"{name}.feed_forward_length")
    head_dim = file.count(f"{name}.attention.key_length", hidden // max(heads, 1))
    return Dimensions(
        hidden=hidden,
        layers=file.count(f"{name}.block_count"),
        inner=inner,
        heads=heads,
        kv_heads=file.count(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rotated=file.count(f"{name}.rope.dimension_count", head_dim),
        vocab=len(file.strings("tokenizer.ggml.tokens")),
        context=file.count(f"{name}.context_length"),
        window=file.count(f"{name}.attention.sliding_window", 0),
        experts=file.count(f"{name}.expert_count", 0),
        used_experts=file.count(f"{name}.expert_used_count", 0),
        expert_inner=file.count(f"{name}.expert_feed_forward_length", inner),
        shared_inner=file.count(f"{name}.expert_shared_feed_forward_length", inner),
    )


def _check_dimensions(file: GGUFFile, name: str, model_type: str, a: Dimensions) -> None:
    numbers = (a.hidden, a.layers, a.inner, a.heads, a.kv_heads, a.head_dim, a.vocab, a.context)
    if 0 in numbers or a.layers > MAX_LAYERS or a.heads % a.kv_heads or a.rotated % 2:
        raise GGUFError(
            f"invalid dimensions (hidden {a.hidden}, {a.layers} layers, {a.heads} query and "
            f"{a.kv_heads} KV heads of {a.head_dim}, {a.vocab} tokens)"
        )
    traits = TRAITS[model_type]
    key = f"{name}.attention.value_length"
    if file.count(key, a.head_dim) != a.head_dim:
        raise GGUFError(
            f"{key} is {file.count(key)}; it must equal the head dimension {a.head_dim}"
        )
    if a.rotated != a.head_dim and not (traits.partial and 0 < a.rotated < a.head_dim):
        raise GGUFError(
            f"{name}.rope.dimension_count is {a.rotated}; it must equal the head dimension "
            f"{a.head_dim}"
        )
    if not traits.free_head_dim and a.head_dim != a.hidden // a.heads:
        raise GGUFError(
            f"the head dimension is {a.head_dim}, but mlx_lm's {model_type} requires "
            f"{a.hidden // a.heads}"
        )
    has_experts = any("experts" in rule.shape for rule in LAYER_RULES[model_type])
    if bool(a.experts) != has_experts or not bool(a.experts) <= a.used_experts <= a.experts:
        raise GGUFError(
            f"{name}.expert_count is {a.experts}, of which {a.used_experts} are used; mlx_lm's "
            f"{model_type} {'needs a used expert' if has_experts else 'has no experts'}"
        )


def _check_keys(
    file: GGUFFile, name: str, model_type: str, sizes: Dimensions, theta: float
) -> None:
    same = {
        "attention.scale": sizes.head_dim**-0.5,
        "attention.key_length_swa": sizes.head_dim,
        "attention.value_length_swa": sizes.head_dim,
        "rope.dimension_count_swa": sizes.rotated,
        "rope.freq_base_swa": theta,
        "embedding_length_out": sizes.hidden,
    }
    windowed = TRAITS[model_type].windows == "layers"
    gguf_known_keys.check_keys(file, name, model_type, same, windowed)


def _check_tensors(file: GGUFFile, architecture: GGUFArchitecture) -> None:
    optional = {rule.tensor for rule in architecture.rules() if rule.optional}
    known = set(gguf_rope_scaling.TENSORS)
    for target in architecture.targets():
        known.add(target.tensor)
        tensor = file.tensors.get(target.tensor)
        if tensor is None:
            if target.tensor.split(".", 2)[-1] in optional:
                continue
            raise GGUFError(f"tensor {target.tensor} is missing")
        if tensor.shape != target.shape:
            raise GGUFError(
                f"tensor {target.tensor} has shape {tensor.shape}, expected {target.shape}"
            )
    for name in file.tensors:
        if name not in known:
            raise GGUFError(
                f"tensor {name}: mlx_lm's {architecture.model_type} has no such parameter"
            )
