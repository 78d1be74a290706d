"""Tiny model directories, as the real mlx_lm loads them, and plain mlx_lm's own answers."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

# Makes ``stub_engine`` and the state machine importable: tests are no packages here.
sys.path.insert(0, str(Path(__file__).parent))

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

    from labkit.engine.model_loader import _module, install_attention_hook

    install_attention_hook()
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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A function from architecture to a directory, built once per session."""
    root = tmp_path_factory.mktemp("models")

    def find(name):
        path = root / name
        return path if path.is_dir() else build_model_dir(path, CONFIGS[name])

    return find


@pytest.fixture(scope="session")
def plain_greedy(model_dir):
    """A function: architecture, prompt, length -> tokens of plain mlx_lm's own loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    models = {}

    def run(name, prompt, max_tokens):
        if name not in models:
            models[name] = load_model(model_dir(name))[0]
        steps = generate_step(mx.array(prompt), models[name], max_tokens=max_tokens)
        return [int(token) for token, _ in steps]

    return run
