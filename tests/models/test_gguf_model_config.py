"""A model of each architecture, written as llama.cpp's converter writes it, computes the same.

The files' names of tensors and keys are written here once more, by hand, from llama.cpp's
``convert_hf_to_gguf.py``.
"""

import dataclasses
import json
from types import SimpleNamespace

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf_files import local
from mlx.utils import tree_flatten

from labkit.engine.model.model_loader import _module, load_model
from labkit.models.gguf import GGUFError, gguf_header, gguf_model_config

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def projections(path, suffix=""):
    parts = ("gate", "up", "down")
    return {f"{path}.{part}_proj": f"ffn_{part}{suffix}" for part in parts}


COMMON_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **projections("mlp"),
    **projections("mlp.switch_mlp", "_exps"),
    **projections("mlp.shared_expert", "_shexp"),
}
OLMO_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA_NAMES = OLMO_NAMES | {"pre_feedforward_layernorm": "ffn_norm"}
MOE = {"expert_count": 4, "expert_used_count": 2}
MOE_CONFIG = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# With a base of 100, three of a small head's eight frequencies lie between the ends.
SMALL_LLAMA3 = LLAMA3 | {"original_max_position_embeddings": 200}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}
LAYERS = ["sliding_attention", "full_attention"]


def architecture(name, model_type, config=None, keys=None, names=None, **traits):
    return name, model_type, config or {}, keys or {}, names or {}, traits


# The architecture in GGUF, mlx_lm's class, keys of config.json, keys of GGUF, names of tensors, and
# traits: interleaved rows, norms with 1 added, factors of RoPE.
ARCHITECTURES = {
    "llama": architecture("llama", "llama", interleaved=True),
    "llama, biases": architecture(
        "llama", "llama", {"attention_bias": True, "mlp_bias": True}, interleaved=True
    ),
    "llama, llama3": architecture(
        "llama",
        "llama",
        {"rope_scaling": SMALL_LLAMA3, "rope_theta": 100.0},
        {"rope.freq_base": 100.0},
        interleaved=True,
        factors=SMALL_LLAMA3,
    ),
    "mistral": architecture("mistral", "llama", interleaved=True),
    "mixtral": architecture(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        MOE,
        {
            "block_sparse_moe.gate": "ffn_gate_inp",
            **projections("block_sparse_moe.switch_mlp", "_exps"),
        },
        interleaved=True,
    ),
    "qwen2, linear": architecture(
        "qwen2",
        "qwen2",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen3, yarn": architecture(
        "qwen3",
        "qwen3",
        {"rope_scaling": YARN, "head_dim": 24},
        {
            **YARN_KEYS,
            "attention.key_length": 24,
            "attention.value_length": 24,
        },
    ),
    "qwen2moe": architecture(
        "qwen2moe",
        "qwen2_moe",
        MOE_CONFIG,
        {**MOE, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3moe": architecture(
        "qwen3moe", "qwen3_moe", MOE_CONFIG, {**MOE, "expert_feed_forward_length": 32}
    ),
    "gemma2": architecture(
        "gemma2",
        "gemma2",
        {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
        {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
        GEMMA_NAMES,
        plus_one=True,
    ),
    "gemma3": architecture(
        "gemma3",
        "gemma3_text",
        {
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 5000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base_swa": 5000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        GEMMA_NAMES,
        plus_one=True,
    ),
    "phi3": architecture(
        "phi3",
        "phi3",
        {"partial_rotary_factor": 0.5},
        {"rope.dimension_count": 8, "attention.sliding_window": 100},
    ),
    "granite": architecture(
        "granite",
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {
            "attention.scale": 0.2,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
        },
        interleaved=True,
    ),
    "smollm3": architecture("smollm3", "smollm3", {"num_hidden_layers": 4}, interleaved=True),
    "olmo2": architecture("olmo2", "olmo2", names=OLMO_NAMES),
    "olmo3": architecture(
        "olmo2",
        "olmo3",
        {"sliding_window": 8, "layer_types": LAYERS},
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": np.array([1, 0], "<u4"),
        },
        OLMO_NAMES,
    ),
    "glm4": architecture(
        "glm4",
        "glm4",
        {"partial_rotary_factor": 0.5, "attention_bias": True},
        {"rope.dimension_count": 8},
        {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "gpt-oss": architecture(
        "gpt-oss",
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": LAYERS,
            "rope_scaling": YARN,
        },
        {
            **MOE,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 8,
            **YARN_KEYS,
        },
        {
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router": "ffn_gate_inp",
            **projections("mlp.experts", "_exps"),
        },
    ),
}


def original(model_type, config):
    """Return a model of mlx_lm with random weights."""
    settings = {**SIZES, "model_type": model_type, "vocab_size": len(gguf_files.vocabulary()[0])}
    settings |= config
    module = _module(model_type)
    model = module.Model(module.ModelArgs.from_dict(settings))
    rng = np.random.default_rng(0)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        noise = rng.standard_normal(value.shape, np.float32)
        weights[name] = 0.1 * noise if value.ndim == 1 else noise * 1.5 / np.sqrt(value.shape[-1])
        if value.ndim == 1 and name.endswith("norm.weight"):
            weights[name] += 1
    model.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    return model, settings, weights


def interleaved(rows, heads):
    """Order rows for RoPE over neighbouring pairs, as llama.cpp's converter does for llama."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def factors_of(scaling, dims, theta):
    """Return ``rope_freqs.weight`` as llama.cpp's converter computes it."""
    factors = []
    for i in range(dims // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / dims)
        cycles = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        s = min(max((cycles - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - s) / scaling["factor"] + s))
    return np.array(factors, "<f4")


def gguf_model(path, name):
    """Write a model as GGUF in float32, and return the model and its config."""
    arch, model_type, config, keys, names, traits = ARCHITECTURES[name]
    model, settings, weights = original(model_type, config)
    names = COMMON_NAMES | names
    tensors = {}
    for parameter, array in weights.items():
        if parameter in names:
            tensor = names[parameter]
        else:
            _, _, layer, rest = parameter.split(".", 3)
            stem, _, leaf = rest.rpartition(".")
            tensor = names[rest] if rest in names else f"{names[stem]}.{leaf}"
            tensor = f"blk.{layer}.{tensor}"
        for projection, heads in (
            ("q_proj", "num_attention_heads"),
            ("k_proj", "num_key_value_heads"),
        ):
            if traits.get("interleaved") and f"{projection}." in parameter:
                array = interleaved(array, settings[heads])
        if traits.get("plus_one") and "norm" in parameter:
            array = array + np.float32(1)
        if "shared_expert_gate" in parameter:
            array = array.reshape(-1)
        tensors[tensor] = (gguf_files.F32, array.shape, array.astype("<f4").tobytes())
    if "factors" in traits:
        factors = factors_of(traits["factors"], settings["head_dim"], settings["rope_theta"])
        tensors["rope_freqs.weight"] = (gguf_files.F32, factors.shape, factors.tobytes())
    changes = {f"{arch}.{key}".replace(".", "__"): value for key, value in keys.items()}
    changes[f"{arch}__block_count"] = settings["num_hidden_layers"]
    metadata = gguf_files.metadata(arch, **changes)
    gguf_files.write(path, metadata, tensors)
    return model, settings


def tensors_of(file):
    """Return the tensors of a file in float32, to be written again."""
    blocks = {name: np.asarray(file.blocks(tensor)) for name, tensor in file.tensors.items()}
    return {name: (0, file.tensors[name].shape, bytes(data)) for name, data in blocks.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_logits_are_those_of_mlx_lm_s_model(tmp_path, no_cache, name):
    model, settings = gguf_model(tmp_path / "m.gguf", name)
    loaded = load_model(local(tmp_path / "m.gguf").path)
    assert loaded.model_type == settings["model_type"]
    ids = mx.array(np.random.default_rng(1).integers(4, 260, (1, 40)))
    expected, logits = (np.array(one(ids)) for one in (model, loaded.model))
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected))


def test_every_architecture_is_tested():
    assert {names[0] for names in ARCHITECTURES.values()} == {*gguf_model_config.MODEL_TYPES}
    assert {names[1] for names in ARCHITECTURES.values()} == {*gguf_model_config.TRAITS}


@pytest.mark.parametrize("name", ["qwen2moe", "glm4", "gpt-oss"])
def test_a_class_without_a_tied_output_gets_a_copy_of_the_embedding(tmp_path, no_cache, name):
    gguf_model(tmp_path / "m.gguf", name)
    whole = gguf_header.read_header(tmp_path / "m.gguf")
    tensors = tensors_of(whole)
    tensors.pop("output.weight", None)
    gguf_files.write(tmp_path / "tied.gguf", dict(whole.metadata), tensors)
    model = load_model(local(tmp_path / "tied.gguf").path).model
    assert mx.array_equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_experts_of_every_type_load(tmp_path, no_cache):
    """MLX multiplies by experts, so block formats become its own layers with the same numbers."""
    path = tmp_path / "m.gguf"
    gguf_model(path, "qwen3moe")
    whole = gguf_header.read_header(path)
    tensors = tensors_of(whole)
    rng = np.random.default_rng(0)
    sizes = {"expert_feed_forward_length": 256, "embedding_length": 64}
    kinds = {"gate": gguf_files.Q4_0, "up": gguf_files.MXFP4, "down": gguf_files.Q4_K}
    for layer in range(2):
        for part, kind in kinds.items():
            if layer and part == "down":
                kind = gguf_files.Q6_K
            shape = (4, 64, 256) if part == "down" else (4, 256, 64)
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = gguf_files.matrix(kind, shape, rng)
    metadata = dict(whole.metadata) | {f"qwen3moe.{key}": size for key, size in sizes.items()}
    gguf_files.write(path, metadata, tensors)
    model = load_model(local(path).path).model
    layers = [layer.mlp.switch_mlp for layer in model.model.layers]
    assert [layers[0].gate_proj.mode, layers[0].up_proj.mode] == ["affine", "mxfp4"]
    assert (layers[0].down_proj.bits, layers[0].down_proj.group_size) == (4, 32)
    assert layers[1].down_proj.weight.dtype == mx.float32
    logits = np.array(model(mx.array([[5, 6, 7]])))
    assert np.isfinite(logits).all() and logits.std() > 0.01


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            {"llama.expert_count": 8},
            "expert_count is 8, of which 0 are used; mlx_lm's mix",
        ),
        ("qwen3moe", {"qwen3moe.expert_count": 0}, "mlx_lm's qwen3_moe needs a used expert"),
        ("qwen2, linear", {"qwen2.rope.scaling.type": "su"}, "must be one of: none, linear, yarn"),
        ("qwen2, linear", {"qwen2.rope.scaling.factor": 0.0}, "must be finite and above 0"),
        ("qwen3, yarn", {"qwen3.rope.scaling.attn_factor": 1.5}, "mlx_lm computes with 1.0"),
        ("qwen3, yarn", {"qwen3.rope.scaling.yarn_log_multiplier": 0.1}, "is not 0"),
        ("glm4", {"glm4.rope.scaling.factor": 2.0}, "type linear: mlx_lm's glm4 has no such"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "mlx_lm's class does not have"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}, "pattern is 0; it must be 1 or"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 0}, "pattern is 0; it must be 1 or"),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": np.array([1], "<u4")},
            "has 1 entries for 2 layers",
        ),
    ],
)
def test_what_mlx_lm_s_class_does_not_compute_is_one_line(tmp_path, name, change, message):
    path = tmp_path / "m.gguf"
    gguf_model(path, name)
    whole = gguf_header.read_header(path)
    tensors = tensors_of(whole)
    gguf_files.write(path, dict(whole.metadata) | change, tensors)
    with pytest.raises(GGUFError, match=message) as error:
        gguf_model_config.read_architecture(gguf_header.read_header(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        LLAMA3 | {"factor": 32.0},
        LLAMA3 | {"low_freq_factor": 2.0, "original_max_position_embeddings": 4096},
    ],
)
def test_llama_3_s_scaling_is_recovered_from_its_factors(tmp_path, no_cache, scaling):
    """The heads and the base of Llama 3.2. Only the ratio of the ends is a fact of the factors."""
    theta, dims = 500_000.0, 64
    factors = factors_of(scaling, dims, theta)
    tensors = {"rope_freqs.weight": (gguf_files.F32, factors.shape, factors.tobytes())}
    path = gguf_files.write(tmp_path / "m.gguf", {"a": 1}, tensors)
    read = gguf_model_config.gguf_rope_scaling.read_rope_scaling(
        gguf_header.read_header(path), "llama", theta, dims
    )
    np.testing.assert_allclose(factors_of(read, dims, theta), factors, rtol=1e-6)
    if scaling["low_freq_factor"] == 1:
        assert read == {"type": "llama3", **scaling}


@pytest.mark.parametrize("factors", [np.full(32, 2.0), np.geomspace(1, 9, 32)])
def test_other_factors_are_refused(tmp_path, factors):
    data = factors.astype("<f4")
    tensors = {"rope_freqs.weight": (gguf_files.F32, data.shape, data.tobytes())}
    path = gguf_files.write(tmp_path / "m.gguf", {"a": 1}, tensors)
    with pytest.raises(GGUFError, match="not those of Llama 3's scaling"):
        gguf_model_config.gguf_rope_scaling.read_rope_scaling(
            gguf_header.read_header(path), "llama", 500_000.0, 64
        )


PHI4 = {"phi3.context_length": 131072, "phi3.rope.scaling.original_context_length": 4096}
PHI4_FACTOR = {"phi3.rope.scaling.attn_factor": 1.1902381}  # Phi-4-mini's
LLAMA3_FACTORS = {"rope_freqs.weight": factors_of(LLAMA3, 64, 500_000.0)}
LONG_FACTORS = {f"rope_factors_{word}.weight": np.ones(32, "<f4") for word in ("long", "short")}


def rope_scaling(tmp_path, name, keys, factors):
    tensors = {
        tensor: (gguf_files.F32, data.shape, data.tobytes()) for tensor, data in factors.items()
    }
    path = gguf_files.write(tmp_path / "m.gguf", {"a": 1} | keys, tensors)
    file = gguf_header.read_header(path)
    return gguf_model_config.gguf_rope_scaling.read_rope_scaling(file, name, 500_000.0, 64)


@pytest.mark.parametrize(
    ("name", "keys", "factors", "kind"),
    [
        ("phi3", PHI4 | PHI4_FACTOR, LONG_FACTORS, "longrope"),
        ("phi3", PHI4 | PHI4_FACTOR | {"phi3.rope.scaling.type": "longrope"}, LONG_FACTORS, None),
        ("phi3", {"phi3.context_length": 4096}, LONG_FACTORS, "longrope"),
        ("llama", {"llama.rope.scaling.type": "none"}, LLAMA3_FACTORS, "llama3"),
        ("llama", {"llama.rope.scaling.attn_factor": 1.0}, LLAMA3_FACTORS, "llama3"),
    ],
)
def test_factors_whose_keys_say_nothing_else_are_read(tmp_path, name, keys, factors, kind):
    read = rope_scaling(tmp_path, name, keys, factors)
    assert read["rope_type"] == (kind or "longrope")


@pytest.mark.parametrize(
    ("name", "keys", "factors", "message"),
    [
        (
            "llama",
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            LLAMA3_FACTORS,
            "type is linear with factor 2.0, beside the tensor rope_freqs.weight",
        ),
        ("llama", {"llama.rope.scale_linear": 4.0}, LLAMA3_FACTORS, "linear with factor 4.0"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, LLAMA3_FACTORS, "type is yarn with fact"),
        (
            "phi3",
            PHI4 | PHI4_FACTOR | {"phi3.rope.scaling.factor": 2.0},
            LONG_FACTORS,
            "linear with factor 2.0, beside the tensor rope_factors_long.weight",
        ),
        ("phi3", PHI4, LONG_FACTORS, "attn_factor is 1; mlx_lm computes with 1.19024"),
        (
            "phi3",
            PHI4 | {"phi3.rope.scaling.attn_factor": 1.25},
            LONG_FACTORS,
            "attn_factor is 1.25; mlx_lm computes with 1.19024",
        ),
        *(
            (
                "llama",
                {"llama.rope.scaling.attn_factor": 1.5, **keys},
                factors,
                r"attn_factor is 1.5; mlx_lm computes with 1.0",
            )
            for keys, factors in (
                ({}, LLAMA3_FACTORS),
                ({}, {}),
                ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {}),
            )
        ),
        ("llama", {"llama.rope.scaling.yarn_attn_factor": 2.0}, {}, "yarn_attn_factor is 2; mlx"),
    ],
)
def test_scaling_that_mlx_lm_would_drop_is_one_line(tmp_path, name, keys, factors, message):
    with pytest.raises(GGUFError, match=message) as error:
        rope_scaling(tmp_path, name, keys, factors)
    assert "\n" not in str(error.value)


def test_mlx_lm_s_longrope_multiplies_by_the_factor_that_is_checked(tmp_path):
    from mlx_lm.models.rope_utils import SuScaledRoPE

    path = gguf_files.write(tmp_path / "m.gguf", PHI4, {})
    expected = gguf_model_config.gguf_rope_scaling._longrope_attn_factor(
        gguf_header.read_header(path), "phi3"
    )
    assert SuScaledRoPE(64, 1e4, 131072, 4096)._scale == pytest.approx(expected, rel=1e-9)


def test_a_window_that_mlx_lm_lacks_ends_the_context(tmp_path, no_cache):
    path = gguf_files.model(tmp_path / "m.gguf", "qwen3", qwen3__attention__sliding_window=96)
    config = json.loads((local(path).path / "config.json").read_text())
    assert config["max_position_embeddings"] == 96


DENSE = gguf_model_config.Dimensions(
    hidden=64, layers=2, inner=96, heads=4, kv_heads=2, head_dim=16, rotated=16, vocab=300,
    context=512, window=0, experts=0, used_experts=0, expert_inner=96, shared_inner=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {}, None),
        ("llama", {"layers": 1024}, None),
        ("llama", {"layers": 1025}, "invalid dimensions"),
        *(
            ("llama", {name: 0}, "invalid dimensions")
            for name in ("hidden", "layers", "inner", "heads", "head_dim", "vocab", "context")
        ),
        ("llama", {"kv_heads": 4}, None),
        ("llama", {"kv_heads": 3}, "invalid dimensions"),
        ("llama", {"rotated": 15}, "invalid dimensions"),
        ("llama", {"head_dim": 32, "rotated": 32}, None),
        ("qwen2", {"head_dim": 32, "rotated": 32}, "head dimension is 32, .*qwen2 requires 16"),
        ("granite", {"head_dim": 8, "rotated": 8}, "head dimension is 8, .*granite requires 16"),
        ("llama", {"rotated": 8}, "it must equal the head dimension 16"),
        ("glm4", {"rotated": 8}, None),
        ("glm4", {"rotated": 0}, "rope.dimension_count is 0"),
        ("glm4", {"rotated": 18}, "rope.dimension_count is 18"),
        ("llama", {"value_length": 8}, "value_length is 8; it must equal the head dimension 16"),
        ("llama", {"experts": 2, "used_experts": 1}, "llama has no experts"),
        ("llama", {"used_experts": 1}, "llama has no experts"),
        ("mixtral", {}, "needs a used expert"),
        ("mixtral", {"experts": 2}, "expert_count is 2, of which 0 are used"),
        ("mixtral", {"experts": 2, "used_experts": 3}, "of which 3 are used"),
        ("mixtral", {"experts": 2, "used_experts": 2}, None),
        ("mixtral", {"experts": 2, "used_experts": 1}, None),
    ],
)
def test_dimensions_are_those_that_a_class_computes(model_type, changes, message):
    sizes = {key: value for key, value in changes.items() if key != "value_length"}
    file = SimpleNamespace(count=lambda key, default=0: changes.get(key.split(".")[-1], default))
    check = gguf_model_config._check_dimensions
    arguments = file, "a", model_type, dataclasses.replace(DENSE, **sizes)
    if message is None:
        check(*arguments)
    else:
        with pytest.raises(GGUFError, match=message):
            check(*arguments)
