"""Which keys of a GGUF file's architecture labkit reads, and which it may leave out.

A key that changes what the model computes, and that mlx_lm's class does not compute, must not be
left out silently. So a file is refused if it has a key of its architecture that is in none of the
tables here. The names are those of llama.cpp's ``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.models.gguf.gguf_header import GGUFError, GGUFFile

# Keys that are read for every class, without the architecture's name.
READ = frozenset(
    (
        *("context_length", "embedding_length", "block_count", "feed_forward_length"),
        *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length")),
        *(f"attention.{key}" for key in ("value_length", "layer_norm_rms_epsilon")),
        *("attention.sliding_window", "rope.dimension_count", "rope.freq_base"),
        *("rope.scale_linear", "expert_count", "expert_used_count"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
        *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length")),
        *(f"rope.scaling.{key}" for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor")),
        *(f"rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow", "log_multiplier")),
    )
)
# Keys that are read for one class.
READ_BY_CLASS = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": (
        "final_logit_softcapping",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
    ),
    "granite": ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    "olmo3": ("attention.sliding_window_pattern",),
    "gpt_oss": ("attention.sliding_window_pattern",),
}
# Keys that change nothing in generated text.
IGNORED = frozenset(
    (
        *("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"),
        "attention.layer_norm_epsilon",
    )
)
# Values with which a key changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("expert_weights_scale", "attention.output_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("router_logit_softcapping", "rope.scaling.alpha"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), (0,)),
    **dict.fromkeys(("attention.shared_kv_layers", "leading_dense_block_count"), (0,)),
    "nextn_predict_layers": (0,),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
# The same for one class: shared experts, the function of the router, and whether the weights of
# the used experts add up to 1.
NEUTRAL_BY_CLASS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "mixtral": {"expert_gating_func": (0, 1), "expert_weights_norm": (True,)},
    "qwen2_moe": {"expert_gating_func": (0, 1), "expert_shared_count": (0, 1)},
    "qwen3_moe": {"expert_gating_func": (0, 1), "expert_weights_norm": (True,)},
    "gpt_oss": {"expert_gating_func": (0, 1, 3)},
}


def check_keys(
    file: GGUFFile, name: str, model_type: str, same: Mapping[str, float], windowed: bool
) -> None:
    """Check that mlx_lm's class ``model_type`` computes everything that the file's keys ask for.

    ``name``: the architecture's name in GGUF, with which the keys begin. ``same``: the values that
    the class computes with, by key; another value is refused. ``windowed``: whether the class has
    layers with a sliding window. Raises ``GGUFError`` if a key has a value that the class does not
    compute with, or labkit does not know the key.
    """
    neutral = {
        **NEUTRAL,
        **{key: (0, value) for key, value in same.items()},
        **NEUTRAL_BY_CLASS.get(model_type, {}),
    }
    read = {*READ, *READ_BY_CLASS.get(model_type, ()), *IGNORED}
    if not windowed:
        read.add("attention.sliding_window_pattern")
    for key in file.metadata:
        suffix = key.removeprefix(f"{name}.")
        if suffix in (key, *read):
            continue
        if suffix not in neutral:
            raise GGUFError(f"{key}: labkit does not know this key, so it cannot leave it out")
        value = file.scalar(key)
        if not any(_equal(value, other) for other in neutral[suffix]):
            raise GGUFError(f"{key} is {value!r:.100}; mlx_lm's {model_type} does not compute this")


def _equal(value: Any, other: float) -> bool:
    """Compare numbers up to the precision of float32 in the file. Texts and lists equal none."""
    if not isinstance(value, int | float):
        return False
    if isinstance(value, bool) or isinstance(other, bool):
        return value == other
    return abs(value - other) <= 1e-6 * max(1.0, abs(other))
