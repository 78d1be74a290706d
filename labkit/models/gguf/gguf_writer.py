"""Export a model directory as a GGUF file in float32, so that llama.cpp runs the same weights.

Two architectures are supported: mlx_lm's qwen3, which labkit's synthetic models have, and llama, in
which llama.cpp interleaves the two halves of a query's or key's head for RoPE. The tokenizer must
be byte-level BPE. Tensor and metadata names are those of llama.cpp's own converter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit.config import ConfigError, require
from labkit.machine import cache_entries
from labkit.models import eos_token_ids, model_json
from labkit.models.gguf.gguf_header import CONTROL_TOKEN, NORMAL_TOKEN, USER_DEFINED_TOKEN
from labkit.models.gguf.gguf_pre_tokenizers import DIGIT, GPT2, PRE_TOKENIZERS
from labkit.models.gguf.gguf_tensor_names import LAYER_RULES

RECIPE_VERSION = 4  # part of the file's name: raise it when the file's content changes
ARCHITECTURES = ("qwen3", "llama")
INTERLEAVED = ("q_proj", "k_proj")  # matrices of llama whose rows are reordered
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{rule.parameter: rule.tensor.rpartition(".")[0] for rule in LAYER_RULES["qwen3"]},
}
OPTION = "engine.server.command: {gguf}"
REMEDY = "name a GGUF file in the command instead"
DEFAULT_ROPE_THETA = 10_000.0  # of a llama whose config.json has none, as in mlx_lm


def check_package() -> None:
    """Raise ``ConfigError`` if the package gguf is not installed."""
    require(
        find_spec("gguf") is not None, f"{OPTION}: gguf is not installed; run: pip install gguf"
    )


def export_gguf(model_dir: Path) -> Path:
    """Export a model directory, unless the cache already has its GGUF file; return the file's path.

    Raises ``ConfigError`` if the model is quantised, of another architecture, or has something else
    that the file could not hold, or the package gguf is not installed. The message is one line.
    """
    from labkit.models.model_directory import inspect

    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    _check_model(config)
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text("utf-8"))
    pre_tokenizer = _pre_tokenizer_name(tokenizer)
    special_ids = _special_ids(model_dir, config)
    check_package()
    import gguf

    digest = inspect(model_dir, name=model_dir.name, option=OPTION).digest
    path = cache_entries.root() / "gguf" / f"{model_dir.name}-{digest[:16]}-{RECIPE_VERSION}.gguf"
    if not path.is_file():
        with cache_entries.building_file(path) as temporary:
            writer = gguf.GGUFWriter(temporary, config["model_type"])
            _add_metadata(writer, config)
            _add_tokenizer(writer, tokenizer, pre_tokenizer, config["vocab_size"])
            for name, token in special_ids.items():
                getattr(writer, f"add_{name}_token_id")(token)
            _write_tensors(writer, model_dir, config)
    return path


def _check_model(config: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if the file could not hold what a model's config.json says."""
    kind = config.get("model_type")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_scaled = (scaling.get("type") or scaling.get("rope_type", "default")) != "default"
    reasons = {
        f"a quantised {kind}": any(config.get(k) for k in ("quantization", "quantization_config")),
        f"{kind}": kind not in ARCHITECTURES,
        f"{kind} without max_position_embeddings": model_json.max_context(config) is None,
        f"{kind} with RoPE scaling": is_scaled,
        # mlx_lm's qwen3 computes without windows.
        f"{kind} with sliding windows": kind == "llama"
        and "sliding_attention" in (config.get("layer_types") or ()),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    require(
        reason is None,
        f"{OPTION}: only {' and '.join(ARCHITECTURES)} models with floating-point weights and "
        "max_position_embeddings, without RoPE scaling and without sliding windows can be "
        f"exported as GGUF, and this is {reason}; {REMEDY}",
    )


def _pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a tokenizer.json.

    Raises ``ConfigError`` if the tokenizer is not byte-level BPE, or llama.cpp does not have its
    pre-tokenizer. The message is one line.
    """
    model, splits = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    kind = "SentencePiece (byte fallback)" if model.get("byte_fallback") else model.get("type")
    require(
        kind == "BPE",
        f"{OPTION}: only a tokenizer of byte-level BPE can be exported as GGUF, and this is "
        f"{kind}; {REMEDY}",
    )
    parts = splits["pretokenizers"] if splits.get("type") == "Sequence" else [splits]
    patterns, ignores_merges = _patterns(parts), bool(model.get("ignore_merges"))
    name = next(
        (
            name
            for name, pre in PRE_TOKENIZERS.items()
            if pre.patterns == patterns and pre.ignores_merges == ignores_merges
        ),
        None,
    )
    if name is None:
        described = " + ".join(str(part.get("type")) for part in parts)
        splitting = "" if not patterns else f" (patterns {', '.join(map(repr, patterns))})"
        raise ConfigError(
            f"{OPTION}: llama.cpp has no pre-tokenizer like the tokenizer's {described}{splitting}"
            f"{' that ignores merges' if ignores_merges else ''}; {REMEDY}"
        )
    return name


def _patterns(parts: Sequence[dict[str, Any]]) -> tuple[str, ...] | None:
    """Return ``PreTokenizer.patterns`` of a byte-level BPE's pre-tokenizer's parts, else None."""
    patterns: list[str] = []
    for part in parts[:-1]:
        match part:
            case {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            }:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(DIGIT)
            case _:
                return None
    match parts[-1]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
            return tuple(patterns)
        case {"type": "ByteLevel", "add_prefix_space": False}:  # splits with GPT-2's pattern
            return (*patterns, GPT2)
    return None


def _special_ids(model_dir: Path, config: dict[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens by llama.cpp's names: ``bos``, if any, ``eos`` and others.

    ``eos`` is the tokenizer's EOS token, if it has one. Raises ``ConfigError`` if no token ends a
    request. The message is one line.
    """
    own = eos_token_ids.read_tokenizer_eos(model_dir, OPTION)
    ids = eos_token_ids.read_eos_token_ids(model_dir, OPTION)
    ends = sorted((i for i in ids if i < config["vocab_size"]), key=lambda i: i not in own)
    require(
        bool(ends),
        f"{OPTION}: the model has no token that ends a request (eos_token_id in its config.json), "
        f"and llama.cpp would take token 11 for one; {REMEDY}",
    )
    # These are all the names for ends. llama.cpp finds further ones by their texts.
    named = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    bos = config.get("bos_token_id")
    return {"bos": bos, **named} if isinstance(bos, int) else named


def _write_tensors(writer: Any, model_dir: Path, config: dict[str, Any]) -> None:
    """Write the file: all tensors in float32, after the metadata that the writer holds."""
    from labkit.models import safetensors_io

    for file in sorted(model_dir.glob("model*.safetensors")):
        for name, array in safetensors_io.read(file).items():
            tensor = safetensors_io.widen(array)
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
    writer.add_context_length(model_json.max_context(config))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    nested = (config.get("rope_parameters") or {}).get("rope_theta")  # of transformers 5
    writer.add_rope_freq_base(float(config.get("rope_theta") or nested or DEFAULT_ROPE_THETA))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)  # ALL_F32


def _add_tokenizer(
    writer: Any, tokenizer: dict[str, Any], pre_tokenizer: str, vocab_size: int
) -> None:
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    kinds = {
        i: CONTROL_TOKEN if token.get("special") else USER_DEFINED_TOKEN
        for i, token in added.items()
    }
    by_id = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    by_id |= {i: token["content"] for i, token in added.items()}
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([kinds.get(i, NORMAL_TOKEN) for i in range(vocab_size)])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
