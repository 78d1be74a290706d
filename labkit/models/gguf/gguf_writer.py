"""A model directory as one GGUF file in float32: the same weights for llama.cpp.

For the architecture that labkit builds (mlx_lm's qwen3, weights in floating point). The names of
tensors and of the metadata are those of llama.cpp's own converter for Qwen3.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, require
from labkit.machine import cache_dir

RECIPE_VERSION = 1  # part of the file's name: raise it when what is written changes
ARCHITECTURE = "qwen3"
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
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3  # kinds of tokens


def export_gguf(model_dir: Path) -> Path:
    """Return the GGUF file of a model directory, written into the cache the first time.

    Raises
    ------
    ConfigError
        The model is of another architecture, is quantised, or what writes GGUF is not installed.
    """
    from labkit.models.model_directory import inspect

    asked = "engine.server.command: {gguf}"
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    kind = config.get("model_type")
    require(
        kind == ARCHITECTURE and "quantization" not in config,
        f"{asked}: only {ARCHITECTURE} models in floating point are written as GGUF, and this is "
        f"{'quantised ' if 'quantization' in config else ''}{kind}; name a file of your own there",
    )
    require(find_spec("gguf") is not None, f"{asked}: gguf is not installed (pip install gguf)")
    digest = inspect(model_dir, name=model_dir.name, asked=asked).digest
    path = cache_dir.root() / "gguf" / f"{model_dir.name}-{digest[:16]}-{RECIPE_VERSION}.gguf"
    if not path.is_file():
        with cache_dir.building_file(path) as temporary:
            _write_file(model_dir, config, temporary)
    return path


def _write_file(model_dir: Path, config: dict[str, Any], path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors import safe_open

    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_metadata(writer, config)
    _add_tokenizer(writer, model_dir, config)
    for file in sorted(model_dir.glob("model*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                writer.add_tensor(gguf_name(name), tensors.get_tensor(name).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor of mlx_lm's qwen3."""
    stem, _, leaf = name.rpartition(".")
    block = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        block = f"blk.{layer}."
    if stem not in GGUF_NAMES:
        raise ConfigError(f"engine.server.command: {{gguf}}: no name for the tensor {name}")
    return f"{block}{GGUF_NAMES[stem]}.{leaf}"


def _add_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("labkit")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)  # all in float32


def _add_tokenizer(writer: Any, model_dir: Path, config: dict[str, Any]) -> None:
    read = json.loads((model_dir / "tokenizer.json").read_text("utf-8"))
    special = {token["id"]: token["content"] for token in read["added_tokens"]}
    by_id = {number: word for word, number in read["model"]["vocab"].items()} | special
    words = [by_id.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])]
    merges = [one if isinstance(one, str) else " ".join(one) for one in read["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(
        [CONTROL_TOKEN if i in special else NORMAL_TOKEN for i in range(len(words))]
    )
    writer.add_token_merges(merges)
    for add, key in ((writer.add_bos_token_id, "bos"), (writer.add_eos_token_id, "eos")):
        if isinstance(config.get(f"{key}_token_id"), int):
            add(config[f"{key}_token_id"])
    writer.add_add_bos_token(False)
