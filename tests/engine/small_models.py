"""Tiny model directories for tests, in the format that mlx_lm loads."""

import json

import numpy as np

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "eos_token_id": 299,
}
CONFIGS = {
    "qwen3": {**COMMON, "model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {**COMMON, "model_type": "llama", "tie_word_embeddings": False},
    "gemma3": {
        **COMMON,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 11,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 10000.0,
    },
    "quantised": {
        **COMMON,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "quantization": {"bits": 4, "group_size": 32},
    },
    # Attention by hand, without the function that labkit replaces.
    "gemma2": {**COMMON, "model_type": "gemma2", "query_pre_attn_scalar": 64},
}


def build_model_dir(path, settings, seed=0):
    """Write config.json and model.safetensors with weights that give lively logits."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    from labkit.engine.model.model_loader import _module

    module = _module(settings["model_type"])
    model = module.Model(module.ModelArgs.from_dict(settings))
    rng = np.random.default_rng(seed)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        noise = rng.standard_normal(value.shape, np.float32)
        if value.ndim > 1:
            weights[name] = mx.array(noise * 1.5 / np.sqrt(value.shape[-1]))
        else:
            weights[name] = value + mx.array(0.1 * noise)
    if "quantization" in settings:
        model.load_weights(list(weights.items()))
        nn.quantize(model, **settings["quantization"])
        weights = dict(tree_flatten(model.parameters()))
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(settings))
    return path
