"""The tensors of each architecture in GGUF, and the parameters of mlx_lm that they become.

The names of tensors in GGUF are those of llama.cpp's ``gguf-py/gguf/tensor_mapping.py``; the names
of parameters are those of ``mlx_lm.models``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How a tensor becomes a parameter."""

    tensor: str  # the tensor's name in GGUF, within its layer
    parameter: str  # the parameter's path, within its layer, without ``.weight`` or ``.bias``
    # The names of the tensor's dimensions (``Dimensions.size_of``). The last is contiguous.
    shape: tuple[str, ...]
    # The group of biases that the tensor belongs to (``attention_bias`` or ``mlp_bias``), or "" if
    # every file must have the tensor. A file may lack a whole group. If it has only some biases of
    # a group, the others become zeros.
    optional: str = ""
    # Whether to subtract 1: GGUF stores a norm's factor, and mlx_lm's gemma adds 1 to its weight.
    minus_one: bool = False
    bare: bool = False  # whether the parameter's name is ``parameter`` without a suffix

    @property
    def name(self) -> str:
        suffix = self.tensor.rpartition(".")[2]  # ``weight`` or ``bias``
        return self.parameter if self.bare else f"{self.parameter}.{suffix}"


def _matrix(tensor: str, parameter: str, *shape: str) -> TensorRule:
    return TensorRule(f"{tensor}.weight", parameter, shape)


def _bias(tensor: str, parameter: str, *shape: str, optional: str = "") -> TensorRule:
    return TensorRule(f"{tensor}.bias", parameter, shape, optional=optional)


def _norm(tensor: str, parameter: str, size: str = "hidden", *, minus: bool = False) -> TensorRule:
    return TensorRule(f"{tensor}.weight", parameter, (size,), minus_one=minus)


_NORMS = (_norm("attn_norm", "input_layernorm"), _norm("ffn_norm", "post_attention_layernorm"))
_ATTENTION = (
    _matrix("attn_q", "self_attn.q_proj", "queries", "hidden"),
    _matrix("attn_k", "self_attn.k_proj", "keys", "hidden"),
    _matrix("attn_v", "self_attn.v_proj", "keys", "hidden"),
    _matrix("attn_output", "self_attn.o_proj", "hidden", "queries"),
)
_MLP = (
    _matrix("ffn_gate", "mlp.gate_proj", "inner", "hidden"),
    _matrix("ffn_up", "mlp.up_proj", "inner", "hidden"),
    _matrix("ffn_down", "mlp.down_proj", "hidden", "inner"),
)
_QKV_BIASES = (
    _bias("attn_q", "self_attn.q_proj", "queries"),
    _bias("attn_k", "self_attn.k_proj", "keys"),
    _bias("attn_v", "self_attn.v_proj", "keys"),
)
_OPTIONAL_QKV_BIASES = tuple(replace(rule, optional="attention_bias") for rule in _QKV_BIASES)
# In mlx_lm one option (``attention_bias``, ``mlp_bias``) stands for all biases of a kind.
_OPTIONAL_BIASES = (
    *_OPTIONAL_QKV_BIASES,
    _bias("attn_output", "self_attn.o_proj", "hidden", optional="attention_bias"),
    _bias("ffn_gate", "mlp.gate_proj", "inner", optional="mlp_bias"),
    _bias("ffn_up", "mlp.up_proj", "inner", optional="mlp_bias"),
    _bias("ffn_down", "mlp.down_proj", "hidden", optional="mlp_bias"),
)
_HEAD_NORMS = (
    _norm("attn_q_norm", "self_attn.q_norm", "head_dim"),
    _norm("attn_k_norm", "self_attn.k_norm", "head_dim"),
)
_FULL_NORMS = (
    _norm("attn_q_norm", "self_attn.q_norm", "queries"),
    _norm("attn_k_norm", "self_attn.k_norm", "keys"),
)
_GEMMA_NORMS = (
    _norm("attn_norm", "input_layernorm", minus=True),
    _norm("post_attention_norm", "post_attention_layernorm", minus=True),
    _norm("ffn_norm", "pre_feedforward_layernorm", minus=True),
    _norm("post_ffw_norm", "post_feedforward_layernorm", minus=True),
)
_GEMMA_HEAD_NORMS = tuple(replace(rule, minus_one=True) for rule in _HEAD_NORMS)
_FUSED_MLP = (
    _matrix("ffn_up", "mlp.gate_up_proj", "twice inner", "hidden"),
    _matrix("ffn_down", "mlp.down_proj", "hidden", "inner"),
)


def _experts(path: str) -> tuple[TensorRule, ...]:
    return (
        _matrix("ffn_gate_exps", f"{path}.gate_proj", "experts", "expert_inner", "hidden"),
        _matrix("ffn_up_exps", f"{path}.up_proj", "experts", "expert_inner", "hidden"),
        _matrix("ffn_down_exps", f"{path}.down_proj", "experts", "hidden", "expert_inner"),
    )


def _router(path: str) -> TensorRule:
    return _matrix("ffn_gate_inp", path, "experts", "hidden")


_SHARED_EXPERT = (
    TensorRule("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate", ("hidden",)),
    _matrix("ffn_gate_shexp", "mlp.shared_expert.gate_proj", "shared_inner", "hidden"),
    _matrix("ffn_up_shexp", "mlp.shared_expert.up_proj", "shared_inner", "hidden"),
    _matrix("ffn_down_shexp", "mlp.shared_expert.down_proj", "hidden", "shared_inner"),
)
_SINKS_AND_BIASES = (
    TensorRule("attn_sinks.weight", "self_attn.sinks", ("heads",), bare=True),
    *_QKV_BIASES,
    _bias("attn_output", "self_attn.o_proj", "hidden"),
    _bias("ffn_gate_inp", "mlp.router", "experts"),
    _bias("ffn_gate_exps", "mlp.experts.gate_proj", "experts", "expert_inner"),
    _bias("ffn_up_exps", "mlp.experts.up_proj", "experts", "expert_inner"),
    _bias("ffn_down_exps", "mlp.experts.down_proj", "experts", "hidden"),
)

# The tensors of a layer by the class of mlx_lm.
LAYER_RULES: dict[str, tuple[TensorRule, ...]] = {
    "llama": (*_NORMS, *_ATTENTION, *_MLP, *_OPTIONAL_BIASES),
    "smollm3": (*_NORMS, *_ATTENTION, *_MLP, *_OPTIONAL_BIASES),
    "granite": (*_NORMS, *_ATTENTION, *_MLP, *_OPTIONAL_BIASES),
    "qwen2": (*_NORMS, *_ATTENTION, *_QKV_BIASES, *_MLP),
    "qwen3": (*_NORMS, *_ATTENTION, *_HEAD_NORMS, *_MLP),
    "mixtral": (
        *_NORMS,
        *_ATTENTION,
        _router("block_sparse_moe.gate"),
        *_experts("block_sparse_moe.switch_mlp"),
    ),
    "qwen2_moe": (
        *_NORMS,
        *_ATTENTION,
        *_QKV_BIASES,
        _router("mlp.gate"),
        *_experts("mlp.switch_mlp"),
        *_SHARED_EXPERT,
    ),
    "qwen3_moe": (
        *_NORMS,
        *_ATTENTION,
        *_HEAD_NORMS,
        _router("mlp.gate"),
        *_experts("mlp.switch_mlp"),
    ),
    "gemma2": (*_GEMMA_NORMS, *_ATTENTION, *_MLP),
    "gemma3_text": (*_GEMMA_NORMS, *_ATTENTION, *_GEMMA_HEAD_NORMS, *_MLP),
    "phi3": (
        *_NORMS,
        _matrix("attn_qkv", "self_attn.qkv_proj", "queries, keys, values", "hidden"),
        _matrix("attn_output", "self_attn.o_proj", "hidden", "queries"),
        *_FUSED_MLP,
    ),
    "olmo2": (
        _norm("post_attention_norm", "post_attention_layernorm"),
        _norm("post_ffw_norm", "post_feedforward_layernorm"),
        *_ATTENTION,
        *_FULL_NORMS,
        *_MLP,
    ),
    "glm4": (
        _norm("attn_norm", "input_layernorm"),
        _norm("post_attention_norm", "post_self_attn_layernorm"),
        _norm("ffn_norm", "post_attention_layernorm"),
        _norm("post_ffw_norm", "post_mlp_layernorm"),
        *_ATTENTION,
        *_OPTIONAL_QKV_BIASES,  # there is none of the output projection
        *_FUSED_MLP,
    ),
    "gpt_oss": (
        _norm("attn_norm", "input_layernorm"),
        _norm("post_attention_norm", "post_attention_layernorm"),
        *_ATTENTION,
        _router("mlp.router"),
        *_experts("mlp.experts"),
        *_SINKS_AND_BIASES,
    ),
}
LAYER_RULES["olmo3"] = LAYER_RULES["olmo2"]
