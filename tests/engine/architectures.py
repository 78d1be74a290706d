"""A tiny config of every architecture of mlx_lm that a packed forward can meet.

``COMMON`` holds what the families share, under all the names that they have for it; an
architecture reads what it knows and ignores the rest.
"""

from dataclasses import dataclass, field

KINDS = ["sliding_attention", "full_attention"]
ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
SHARP_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}
SCALED = {**ROPE, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
ATTENTION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "layernorm_epsilon": 1e-6,
    "norm_eps": 1e-6,
    "post_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "qk_norm": True,
    "use_qk_norm": True,
    "sliding_window": 8,
    "layer_types": KINDS,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
}
MULTIPLIERS = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 96}
COMMON = {**ATTENTION, **EXPERTS, **MULTIPLIERS, **GPT}
# A latent key is 24 + 8 numbers wide, which the fused kernels take.
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
KIMI = {
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    }
}
CONVOLUTION = {
    "layer_types": ["conv", "full_attention"],
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
GEMMA = {"query_pre_attn_scalar": 16, "rope_local_base_freq": 10_000.0}
LONGCAT = {
    **LATENT,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
SPARSE = {**LATENT, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 4}
INSIDE = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
OUTSIDE = {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False}


def text(kind, **own):
    """A config whose language model stands inside."""
    return {"text_config": {**COMMON, "model_type": kind, **own}}


@dataclass(frozen=True)
class Served:
    """What an architecture needs beside ``COMMON``; ``numpy``: the NumPy forward serves it.

    ``fused``: keys and values have one width, as the fused kernels require.
    """

    own: dict = field(default_factory=dict)
    numpy: bool = True
    fused: bool = True


@dataclass(frozen=True)
class Refused:
    """What an architecture needs beside ``COMMON``; ``words``: why it is refused."""

    own: dict
    words: str


def on_mlx(**own):
    return Served(own, numpy=False)


def on_numpy(**own):
    return Served(own)


SERVED = {
    "Klear": on_mlx(),
    "afm7": on_mlx(hidden_dim=64, num_layers=2, num_kv_reuse_layers=1, num_heads=4, num_kv_heads=2),
    "afmoe": on_mlx(num_dense_layers=1),
    "apertus": on_mlx(post_norm=False),
    "bailing_moe": on_mlx(),
    "cohere": on_numpy(),
    "cohere2": on_numpy(sliding_window_pattern=2),
    "dbrx": on_mlx(
        d_model=64,
        n_layers=2,
        n_heads=4,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    ),
    "deepseek": on_mlx(),
    "deepseek_v2": Served(
        {**LATENT, "rope_scaling": SHARP_YARN},
        numpy=False,
        fused=False,
    ),
    "deepseek_v3": on_mlx(**LATENT, rope_scaling=SHARP_YARN),
    "dots1": on_mlx(),
    "ernie4_5": on_numpy(),
    "ernie4_5_moe": on_mlx(moe_num_shared_experts=1),
    "exaone": on_numpy(num_layers=2),
    "exaone4": on_numpy(sliding_window_pattern="LG", rope_scaling={"rope_type": "default"}),
    "exaone_moe": on_mlx(is_moe_layer=[False, True]),
    "gear": on_numpy(),
    "gemma": on_numpy(),
    "gemma2": on_numpy(**GEMMA),
    "gemma3": on_numpy(**text("gemma3_text", **GEMMA, sliding_window_pattern=2)),
    "gemma3_text": on_numpy(**GEMMA, sliding_window_pattern=2),
    "gemma3n": on_mlx(
        **text(
            "gemma3n_text",
            num_hidden_layers=4,
            layer_types=KINDS * 2,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=128,
            rope_local_base_freq=10_000.0,
            final_logit_softcapping=1_000.0,
            activation_sparsity_pattern=[0.0] * 4,
            hidden_size_per_layer_input=16,
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        )
    ),
    "gemma4": on_numpy(
        **text(
            "gemma4_text",
            global_head_dim=32,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            use_double_wide_mlp=False,
        )
    ),
    "gemma4_text": on_mlx(
        num_hidden_layers=4,
        layer_types=KINDS * 2,
        global_head_dim=32,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16,
    ),
    "glm": on_numpy(),
    "glm4": on_numpy(),
    "glm4_moe": on_mlx(),
    "glm4_moe_lite": on_mlx(**LATENT),
    "gpt2": on_mlx(n_ctx=256),
    "gpt_bigcode": on_numpy(),
    "gpt_neox": on_mlx(rotary_emb_base=10_000, rotary_pct=0.5),
    "gpt_oss": on_mlx(head_dim=64),
    "gptj": on_numpy(rotary_dim=8),
    "granite": on_numpy(),
    "granitemoe": on_mlx(),
    "helium": on_numpy(),
    "hunyuan": on_mlx(
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "alpha": 1_000.0, "factor": 1.0},
    ),
    "hunyuan_v1_dense": on_mlx(rope_scaling={"type": "dynamic", "alpha": 1_000.0, "factor": 1.0}),
    "internlm2": on_numpy(bias=False),
    "internlm3": on_numpy(),
    "iquestloopcoder": on_numpy(loop_window_size=8),
    "kimi_k25": on_mlx(**text("deepseek_v3", **LATENT)),
    "kimi_vl": on_mlx(**text("deepseek_v3", **LATENT)),
    "laguna": on_mlx(
        mlp_layer_types=["dense", "sparse"], rope_parameters=dict.fromkeys(KINDS, ROPE)
    ),
    "lille-130m": on_numpy(block_size=256, n_kv_heads=2),
    "llama": on_numpy(layer_types=None),
    "llama4_text": on_numpy(intermediate_size_mlp=96, no_rope_layers=[1, 0]),
    "mellum": on_mlx(rope_parameters=dict.fromkeys(KINDS, ROPE)),
    "mimo": on_numpy(num_nextn_predict_layers=0),
    "mimo_v2_flash": on_mlx(
        hybrid_layer_pattern=[1, 0],
        moe_layer_freq=[0, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=8,
        scoring_func="sigmoid",
        swa_rope_theta=10_000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        v_head_dim=16,
        swa_head_dim=16,
        swa_v_head_dim=16,
    ),
    "minicpm": on_numpy(dim_model_base=32, scale_depth=1.4, scale_emb=2.0),
    "minicpm3": Served(
        {
            **LATENT,
            "dim_model_base": 32,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "rope_scaling": {**LONG, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        },
        fused=False,
    ),
    "minimax": on_mlx(rotary_dim=8),
    "ministral3": on_mlx(rope_parameters=SCALED),
    "longcat_flash": on_mlx(**LONGCAT, attention_method="MLA", zero_expert_type="identity"),
    "mistral3": on_numpy(**text("llama", layer_types=None)),
    "mistral4": on_mlx(**LATENT, rope_parameters=SCALED),
    "mixtral": on_mlx(),
    "muse_glimmer": on_numpy(),
    "nanbeige": on_numpy(),
    "nanochat": on_mlx(),
    "nemotron": on_mlx(hidden_act="relu2"),
    "nemotron-nas": on_numpy(block_configs=[{"attention": INSIDE, "ffn": OUTSIDE}] * 2),
    "olmo2": on_numpy(),
    "olmo3": on_numpy(),
    "olmoe": on_mlx(),
    "openelm": on_numpy(
        num_transformer_layers=2,
        model_dim=64,
        ffn_dim_divisor=16,
        num_query_heads=[4, 4],
        num_kv_heads=[2, 2],
        ffn_multipliers=[1.0, 1.5],
    ),
    "phi": on_mlx(),
    "phi3": on_numpy(partial_rotary_factor=1.0),
    "phimoe": on_mlx(rope_scaling=LONG),
    "phixtral": on_mlx(num_vocab=128, model_dim=64, num_heads=4, num_layers=2, rotary_dim=8),
    "pixtral": on_numpy(**text("llama", layer_types=None)),
    "plamo": on_numpy(n_shared_head=2),
    "qwen": on_numpy(kv_channels=16, num_key_value_heads=4),
    "qwen2": on_numpy(),
    "qwen2_moe": on_mlx(),
    "qwen2_vl": on_numpy(**text("qwen2")),
    "qwen3": on_numpy(),
    "qwen3_moe": on_mlx(),
    "qwen3_vl": on_numpy(**text("qwen3")),
    "qwen3_vl_moe": on_mlx(**text("qwen3_moe")),
    "seed_oss": on_numpy(),
    "smollm3": on_numpy(layer_types=None, no_rope_layer_interval=2),
    "solar_open": on_mlx(),
    "spark2_5": on_numpy(rope_parameters=dict.fromkeys(KINDS, ROPE)),
    "stablelm": on_numpy(use_qkv_bias=True),
    "starcoder2": on_numpy(),
    "step3p5": on_mlx(num_attention_groups=2, share_expert_dim=32, moe_layers_enum="1"),
    "talkie": on_mlx(),
    "telechat3": on_numpy(),
    "youtu_llm": Served(LATENT, fused=False),
}

# Served with the states of their recurrent or convolutional layers in slots.
RECURRENT = {
    "bailing_hybrid": Served({**LATENT, "layer_group_size": 2, "group_norm_size": 2}, numpy=False),
    "bailing_moe_v3": Served({**LATENT, "layer_group_size": 2}, numpy=False),
    "kimi_k3": Served(text("kimi_k3", **LATENT, **KIMI), numpy=False),
    "kimi_linear": Served({**LATENT, **KIMI, "model_max_length": 256}, numpy=False),
    "bailing_moe_linear": Served({"layer_group_size": 2, "group_norm_size": 2}, numpy=False),
    "falcon_h1": Served(
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
        numpy=False,
    ),
    "granitemoehybrid": Served(
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
        },
        numpy=False,
    ),
    "jamba": Served(
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
        },
        numpy=False,
    ),
    "lfm2": Served(CONVOLUTION, numpy=False),
    "lfm2-vl": Served(text("lfm2", **CONVOLUTION), numpy=False),
    "lfm2_moe": Served(
        {**CONVOLUTION, "use_expert_bias": True, "num_dense_layers": 1}, numpy=False
    ),
    "mamba": Served(
        {"state_size": 16, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 8},
        numpy=False,
    ),
    "mamba2": Served(
        {
            "num_heads": 8,
            "state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_conv_bias": True,
            "time_step_limit": [0.001, 100.0],
            "time_step_rank": "auto",
        },
        numpy=False,
    ),
    "nemotron_h": Served(
        {
            "hybrid_override_pattern": ["M", "*"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_conv_bias": True,
        },
        numpy=False,
    ),
    "olmo_hybrid": Served(
        {
            **LINEAR,
            "linear_allow_neg_eigval": True,
            "layer_types": ["linear_attention", "full_attention"],
        },
        numpy=False,
    ),
    "qwen3_5": Served(text("qwen3_5_text", **LINEAR, num_experts=0), numpy=False),
    "qwen3_5_moe": Served(text("qwen3_5_moe_text", **LINEAR), numpy=False),
    "qwen3_next": Served(LINEAR, numpy=False),
    "recurrent_gemma": Served(
        {
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
        numpy=False,
    ),
    "rwkv7": Served(
        dict.fromkeys(
            ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8
        ),
        numpy=False,
    ),
}
SERVED |= RECURRENT

# They run every line of labkit and every shared function of mlx_lm that any architecture runs:
# of each class of architectures whose layers run the same code, at least one.
REPRESENTATIVES = {
    "afm7",
    "apertus",
    "bailing_hybrid",
    "bailing_moe_v3",
    "dbrx",
    "deepseek_v3",
    "ernie4_5_moe",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_text",
    "gpt_bigcode",
    "gpt_oss",
    "hunyuan_v1_dense",
    "mamba2",
    "minicpm3",
    "nemotron",
    "nemotron-nas",
    "olmo_hybrid",
    "phimoe",
    "phixtral",
    "plamo",
    "rwkv7",
    "stablelm",
    "step3p5",
}

CHUNKS = (
    r"attend within chunks of a fixed length \(attention_chunk_size\) .*, which no attention of "
    "labkit computes; set engine=openai engine.server.preset=mlx_lm, "
)
GROUPS = "attend to compressed groups of tokens beside a window .*; set engine=openai engine.server"
INDEXER = (
    r"an indexer selects the keys that a query attends to \(index_topk.*=\d\), and .*; set "
    "engine=mlx_lm$"
)
GROWS = "a layer's state grows with the sequence, .*; set engine=mlx_lm engine.*max_num_seqs=1$"
OWN_ATTENTION = (
    r"mlx_lm's class computes attention itself, .* \({}\.py, line \d+: .*set engine=mlx_lm$"
)
ONE_POSITION = (
    r"mlx_lm's class does not run over packed tokens \({}\.py, line \d+: .*engine=mlx_lm$"
)
OTHER_WINDOW = "refused by the self-test: the model masks a window of 9 keys, but its cache has"
PACKAGE = "mlx_lm needs a Python package that is not installed"
ONE_AT_A_TIME = (
    "set `engine=openai engine.server.preset=mlx_lm`, whose server computes one request at a time"
)
REFUSED = {
    "baichuan_m1": Refused({"sliding_window_layers": [0], "conv_window": 2}, ONE_POSITION),
    "deepseek_v32": Refused(SPARSE, INDEXER),
    "deepseek_v41": Refused({**LATENT, "o_groups": 2, "o_lora_rank": 16}, GROUPS),
    "glm_moe_dsa": Refused(
        {**SPARSE, "scoring_func": "sigmoid", "moe_layer_freq": 1, "rope_parameters": ROPE}, INDEXER
    ),
    "llama4": Refused(
        text(
            "llama4_text",
            num_hidden_layers=4,
            num_experts_per_tok=1,
            attention_chunk_size=8,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=96,
        ),
        CHUNKS,
    ),
    "longcat_flash_ngram": Refused({**LONGCAT, "ngram_vocab_size_ratio": 2}, GROWS),
    "minimax_m3_vl": Refused(
        text(
            "minimax_m3_vl_text",
            dense_intermediate_size=96,
            rotary_dim=8,
            mlp_layer_types=["dense", "sparse"],
            layer_types=["full_attention", "minimax_m3_sparse"],
            index_n_heads=4,
            index_head_dim=16,
            index_block_size=8,
            index_topk_blocks=2,
        ),
        INDEXER,
    ),
    "olmo": Refused(
        {"d_model": 64, "n_layers": 2, "mlp_hidden_size": 192, "n_heads": 4},
        PACKAGE,
    ),
    "plamo2": Refused(
        {"hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 16}, OWN_ATTENTION
    ),
    # Its masks and its caches have windows of different lengths.
    "plamo3": Refused({"sliding_window_pattern": 2, "window_size": 8}, OTHER_WINDOW),
}

LEFT_OUT = {
    "bitnet": "mlx_lm's class needs Metal",
    "muse_spark": "mlx_lm's class needs Metal",
    "phi3small": "mlx_lm's class writes to fixed ids of a vocabulary of 100,352",
    "prism_hadamard_qwen35": "mlx_lm's class loads weights that another tool packs",
}
# Why an architecture is refused, for readers; where a reason is missing, its words are shown.
REASONS = {
    CHUNKS: "three of four layers attend within chunks of `attention_chunk_size` tokens, and "
    f"labkit's kernels only mask windows that slide; {ONE_AT_A_TIME}",
    GROUPS: f"its layers attend to compressed groups of tokens beside a window; {ONE_AT_A_TIME}",
    INDEXER: "an indexer selects the keys that a query attends to, and labkit's attention reads "
    "all keys; set `engine=mlx_lm`",
    GROWS: "its embedding of n-grams has a state that grows with the prompt; set "
    "`engine=mlx_lm engine.scheduler.max_num_seqs=1`",
    OWN_ATTENTION: "its class computes attention itself, where labkit cannot replace it; set "
    "`engine=mlx_lm`",
    ONE_POSITION: "its convolutions over keys and values expect all tokens of a request in one "
    "row, and labkit packs tokens; set `engine=mlx_lm engine.scheduler.max_num_seqs=1` (mlx_lm's "
    "batches of unequal lengths give other tokens)",
    OTHER_WINDOW: "its prefill attends to one key more than its decode, so a token's result "
    "depends on the step that computes it; set `engine=mlx_lm`",
    PACKAGE: "mlx_lm's class imports a Python package; install it with `pip install ai2-olmo`",
}


def settings(name):
    """The whole config.json of an architecture."""
    own = (SERVED.get(name) or REFUSED[name]).own
    return {**COMMON, **own, "model_type": name, "eos_token_id": 127}
