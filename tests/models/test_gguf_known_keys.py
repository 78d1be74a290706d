"""Which values of a GGUF file's keys change nothing, so that a class may leave them out."""

import numpy as np
import pytest

from labkit.models.gguf.gguf_header import GGUFError
from labkit.models.gguf.gguf_known_keys import check_keys

OFF = ((0, 0.0), (1, 2, 0.5, -1, "0", ["0"]))  # what is accepted, and what is refused
FACTOR = ((0, 1, 1 + 1e-7), (2, 0.5, 1.0001, -1))
TRUE, FALSE = ((True,), (False, np.empty(0, np.int32))), ((False,), (True,))
GATE = ((0, 1), (2, 3, 4))
TABLE = {
    "llama": {
        **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), FACTOR),
        **dict.fromkeys(("expert_weights_scale", "attention.output_scale"), FACTOR),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), OFF),
        **dict.fromkeys(("router_logit_softcapping", "rope.scaling.alpha"), OFF),
        **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), OFF),
        **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), OFF),
        **dict.fromkeys(("attention.shared_kv_layers", "leading_dense_block_count"), OFF),
        "nextn_predict_layers": OFF,
        **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), FACTOR),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), FACTOR),
        "attention.causal": TRUE,
        "use_parallel_residual": FALSE,
        "expert_gating_func": ((), (0, 1)),  # it has no experts
        "a_key_of_tomorrow": ((), (0, 1, True)),
        "vocab_size": ((7,), ()),
    },
    "mixtral": {"expert_gating_func": GATE, "expert_weights_norm": TRUE},
    "qwen2_moe": {
        "expert_gating_func": GATE, "expert_shared_count": ((0, 1), (2,)),
        "expert_weights_norm": ((), (True, False)),
    },
    "qwen3_moe": {"expert_gating_func": GATE, "expert_weights_norm": TRUE},
    "gpt_oss": {"expert_gating_func": ((0, 1, 3), (2, 4))},
    "gemma2": {"attn_logit_softcapping": ((0, 50), ()), "final_logit_softcapping": ((30,), ())},
}  # fmt: skip


class File:
    def __init__(self, key, value):
        self.metadata = {"general.name": "x", "arch.context_length": 8, key: value}

    def scalar(self, key):
        return self.metadata[key]


@pytest.mark.parametrize("model_type", TABLE)
def test_a_value_is_left_out_only_if_it_changes_nothing(model_type):
    for key, (accepted, refused) in TABLE[model_type].items():
        for value in accepted:
            check_keys(File(f"arch.{key}", value), "arch", model_type, {}, True)
        for value in refused:
            with pytest.raises(GGUFError, match=rf"^arch\.{key}"):
                check_keys(File(f"arch.{key}", value), "arch", model_type, {}, True)


def test_a_value_that_the_class_computes_with_is_accepted():
    same = {"attention.scale": 0.125}
    for value in (0.125, 0, 0.125 + 5e-7):
        check_keys(File("arch.attention.scale", value), "arch", "llama", same, True)
    with pytest.raises(GGUFError, match=r"^arch\.attention\.scale is 0\.13; mlx_lm's llama"):
        check_keys(File("arch.attention.scale", 0.13), "arch", "llama", same, True)


def test_a_pattern_of_windows_is_read_where_there_are_some():
    file = File("arch.attention.sliding_window_pattern", 6)
    check_keys(file, "arch", "llama", {}, False)
    check_keys(file, "arch", "olmo3", {}, True)
    with pytest.raises(GGUFError, match="labkit does not know this key"):
        check_keys(file, "arch", "llama", {}, True)
