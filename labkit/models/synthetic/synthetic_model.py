"""Build a model directory for ``mlx_lm.load`` with random weights from a seed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.config import ModelShape, to_plain
from labkit.machine import cache_dir
from labkit.models import model_json
from labkit.models.synthetic import tensor_shapes
from labkit.models.synthetic.tokenizer_corpus import corpus_texts

RECIPE_VERSION = 1  # part of the cache key: raise it when the files that are built change
LIBRARIES = ("numpy", "safetensors", "tokenizers")


def build(shape: ModelShape, *, seed: int, name: str) -> Path:
    """Build a synthetic model, unless the cache already has it, and return its directory.

    The directory has config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json. The same shape, seed, packaged texts and library versions give the same
    bytes. ``name`` is the prefix of the directory's name.
    """
    recipe = ModelRecipe(shape=shape, seed=seed, texts=corpus_texts())
    path = cache_dir.root() / "models" / f"{name}-{recipe.key}"
    if not cache_dir.has_directory(path):
        with cache_dir.building_directory(path) as folder:
            recipe.write(folder)
    return path


@dataclass(frozen=True)
class ModelRecipe:
    """The inputs of a synthetic model: everything that its files depend on."""

    shape: ModelShape
    seed: int
    texts: tuple[str, ...]

    @property
    def key(self) -> str:
        """The digest of all inputs and library versions (16 hex digits), for the cache."""
        inputs = {
            "recipe": RECIPE_VERSION,
            # Null options are left out, so that adding an option keeps the keys of other models.
            "shape": {k: v for k, v in to_plain(self.shape).items() if v is not None},
            "seed": self.seed,
            "texts": self.texts,
            "libraries": {name: version(name) for name in LIBRARIES},
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write the model's four files into ``folder``."""
        from safetensors.numpy import save_file

        from labkit.models.synthetic import synthetic_weights, train_bpe

        tokenizer = train_bpe.train(self.texts, vocab_size=self.shape.vocab_size, seed=self.seed)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        model_json.write_object(folder / "tokenizer_config.json", tokenizer_config())
        model_json.write_object(folder / "config.json", model_config(self.shape))
        path = folder / "model.safetensors"
        save_file(
            synthetic_weights.make_weights(self.shape, seed=self.seed),
            path,
            metadata={"format": "mlx"},
        )
        path.chmod(0o644)  # safetensors makes the file readable only by its owner


def model_config(shape: ModelShape) -> dict[str, Any]:
    """Return the content of config.json, with the keys that mlx_lm and transformers read."""
    hybrid = _hybrid_config(shape) if shape.is_hybrid else {}
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
        **({} if shape.kv_lora_rank is None else tensor_shapes.latent_config_entries(shape)),
        **hybrid,
        **({} if shape.sliding_window is None else _windowed_config(shape)),
    }


def _windowed_config(shape: ModelShape) -> dict[str, Any]:
    """Return the entries of config.json in which a llama with sliding windows differs."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "sliding_window": shape.sliding_window,
        "layer_types": [kinds[shape.has_window(layer)] for layer in range(shape.num_layers)],
    }


def _hybrid_config(shape: ModelShape) -> dict[str, Any]:
    """Return the entries of config.json in which qwen3_next differs from qwen3."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": shape.full_attention_interval,
        "partial_rotary_factor": 0.25,
        "linear_num_value_heads": shape.num_heads,
        "linear_num_key_heads": shape.num_kv_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": tensor_shapes.CONV_KERNEL,
        "num_experts": shape.num_experts or 0,
        "num_experts_per_tok": tensor_shapes.EXPERTS_PER_TOKEN,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "moe_intermediate_size": shape.intermediate_size,
        "shared_expert_intermediate_size": shape.intermediate_size,
    }


def tokenizer_config() -> dict[str, Any]:
    """Return the content of tokenizer_config.json.

    Without this file, transformers would guess a different tokenizer class.
    """
    from labkit.models.synthetic.train_bpe import BOS, EOS

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 40960,
    }
