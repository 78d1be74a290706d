"""Export a model directory as a GGUF file in float32, so that llama.cpp runs the same weights.

Two architectures are supported: mlx_lm's qwen3, which labkit's synthetic models have, and llama, in
which llama.cpp interleaves the two halves of a query's or key's head for RoPE. Tensor and metadata
names are those of llama.cpp's own converter.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, require
from labkit.machine import cache_dir
from labkit.models.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS

RECIPE_VERSION = 2  # part of the file's name: raise it when the file's content changes
ARCHITECTURES = ("qwen3", "llama")
INTERLEAVED = ("q_proj", "k_proj")  # matrices of llama whose rows are reordered
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OPTION = "engine.server.command: {gguf}"
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3  # values of tokenizer.ggml.token_type


def check_package() -> None:
    """Raise ``ConfigError`` if the package gguf is not installed."""
    require(
        find_spec("gguf") is not None, f"{OPTION}: gguf is not installed; run: pip install gguf"
    )


def export_gguf(model_dir: Path) -> Path:
    """Export a model directory, unless the cache already has its GGUF file; return the file's path.

    Raises ``ConfigError`` if the model is quantised or of another architecture, or the package gguf
    is not installed.
    """
    from labkit.models.model_directory import inspect

    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    kind = config.get("model_type")
    require(
        kind in ARCHITECTURES and not (config.get("quantization") or config.get("rope_scaling")),
        f"{OPTION}: only {' and '.join(ARCHITECTURES)} models with floating-point weights and "
        "without RoPE scaling can be exported as GGUF, and this is "
        f"{'a quantised ' if 'quantization' in config else ''}{kind}; name a GGUF file in the "
        "command instead",
    )
    check_package()
    digest = inspect(model_dir, name=model_dir.name, option=OPTION).digest
    path = cache_dir.root() / "gguf" / f"{model_dir.name}-{digest[:16]}-{RECIPE_VERSION}.gguf"
    if not path.is_file():
        with cache_dir.building_file(path) as temporary:
            _write_file(model_dir, config, temporary)
    return path


def _write_file(model_dir: Path, config: dict[str, Any], path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors import safe_open

    writer = gguf.GGUFWriter(path, config["model_type"])
    _add_metadata(writer, config)
    _add_tokenizer(writer, model_dir, config)
    for file in sorted(model_dir.glob("model*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                tensor = tensors.get_tensor(name).astype(np.float32)
                if config["model_type"] == "llama" and name.split(".")[-2] in INTERLEAVED:
                    halves = tensor.reshape(-1, 2, _head_dim(config) // 2, *tensor.shape[1:])
                    tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
                writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return llama.cpp's name for a tensor of mlx_lm's qwen3 or llama."""
    stem, _, leaf = name.rpartition(".")
    block = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        block = f"blk.{layer}."
    if stem not in GGUF_NAMES:
        raise ConfigError(f"engine.server.command: {{gguf}}: tensor {name} has no name in GGUF")
    return f"{block}{GGUF_NAMES[stem]}.{leaf}"


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("labkit")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)  # ALL_F32


def _add_tokenizer(writer: Any, model_dir: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text("utf-8"))
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    by_id = {number: word for word, number in tokenizer["model"]["vocab"].items()} | special
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    splits = tokenizer.get("pre_tokenizer")
    names = (
        name
        for name, pre in PRE_TOKENIZERS.items()
        if json.loads(pre.build().__getstate__()) == splits
    )
    writer.add_tokenizer_pre(next(names, "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(
        [CONTROL_TOKEN if i in special else NORMAL_TOKEN for i in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    for add, key in ((writer.add_bos_token_id, "bos"), (writer.add_eos_token_id, "eos")):
        if isinstance(config.get(f"{key}_token_id"), int):
            add(config[f"{key}_token_id"])
    writer.add_add_bos_token(False)
