"""Build a model directory for ``mlx_lm.load`` with random weights from a seed.

The weights are scaled so that attention is selective and logits are decisive: a model with plain
random weights repeats a single token for ever. Here every matrix has the scale 1/sqrt(fan-in), so
each branch adds about as much to the residual stream as the embedding. The gains of the query and
key norms make attention select a few tokens instead of averaging all of them. The output matrix is
not tied to the embedding: if it were, the last token would get the largest logit again. The heads
of a recurrent layer forget at rates from ``SLOWEST`` to ``FASTEST``.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.config import ConfigError, ModelShape, to_plain
from labkit.machine import cache_entries
from labkit.models import model_json
from labkit.models.synthetic import tensor_shapes

RECIPE_VERSION = 1  # part of the cache key: raise it when the files that are built change
LIBRARIES = ("numpy", "safetensors", "tokenizers")
TEXTS_FOLDER = "workload/texts"
QUESTIONS_FILE = "workload/questions.json"
QK_GAIN = 2.0  # weight of q_norm and k_norm: attention logits get a standard deviation of 4
LOGIT_SCALE = 3.0  # standard deviation of the logits
# Rates at which the heads of a recurrent layer forget: at rate r a head remembers about 1/r tokens.
SLOWEST, FASTEST = 0.02, 2.0


def build(shape: ModelShape, *, seed: int, name: str) -> Path:
    """Build a synthetic model, unless the cache already has it, and return its directory.

    The directory has config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json. The same shape, seed, packaged texts and library versions give the same
    bytes. ``name`` is the prefix of the directory's name.
    """
    recipe = ModelRecipe(shape=shape, seed=seed, texts=corpus_texts())
    path = cache_entries.root() / "models" / f"{name}-{recipe.key}"
    if not cache_entries.has_directory(path):
        with cache_entries.building_directory(path) as folder:
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
        from safetensors.numpy import save_file

        from labkit.models.synthetic import train_bpe

        tokenizer = train_bpe.train(self.texts, vocab_size=self.shape.vocab_size, seed=self.seed)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        model_json.write_object(folder / "tokenizer_config.json", tokenizer_config())
        model_json.write_object(folder / "config.json", model_config(self.shape))
        path = folder / "model.safetensors"
        save_file(make_weights(self.shape, seed=self.seed), path, metadata={"format": "mlx"})
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


def make_weights(shape: ModelShape, *, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a model by name, in float32. Matrices are ``[..., out, in]``."""
    weights = {}
    for name, size in tensor_shapes.matrices(shape).items():
        deviation = size[-1] ** -0.5
        if name == "model.embed_tokens":
            deviation = 1.0
        elif name == "lm_head":
            deviation *= LOGIT_SCALE
        elif name.endswith(".q_proj") and (shape.kv_lora_rank or shape.sliding_window):
            deviation *= QK_GAIN**2  # neither has norms of queries and keys
        weights[f"{name}.weight"] = _draw_matrix(name, size, deviation, seed)
    for name, length in tensor_shapes.vectors(shape).items():
        gain = QK_GAIN if name.endswith(("q_norm", "k_norm")) else 1.0
        weights[f"{name}.weight"] = np.full(length, gain, np.float32)
    for index in range(shape.num_layers):
        if not shape.has_attention(index):
            weights |= _recurrence(shape, f"model.layers.{index}.linear_attn", seed)
    return weights


def _recurrence(shape: ModelShape, layer: str, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return a recurrent layer's convolution and the rates at which its heads forget, by name."""
    name, kernel = f"{layer}.conv1d", tensor_shapes.CONV_KERNEL
    size = (tensor_shapes.convolved_width(shape), kernel, 1)
    return {
        f"{name}.weight": _draw_matrix(name, size, kernel**-0.5, seed),
        f"{layer}.A_log": np.linspace(
            np.log(SLOWEST), np.log(FASTEST), shape.num_heads, dtype=np.float32
        ),
        f"{layer}.dt_bias": np.zeros(shape.num_heads, np.float32),
    }


def _draw_matrix(
    name: str, size: tuple[int, ...], deviation: float, seed: int
) -> npt.NDArray[np.float32]:
    """Draw a matrix from its own random stream, so that it does not depend on other matrices."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(size, dtype=np.float32)
    values *= np.float32(deviation)
    return values


def corpus_texts(package: Traversable | None = None) -> tuple[str, ...]:
    """Return all packaged texts, then all strings of questions.json, in a fixed order.

    ``package``: the folder that contains ``workload/``; by default the package labkit. Raises
    ``ConfigError`` if the installation lacks the files.
    """
    package = files("labkit") if package is None else package
    folder = package.joinpath(TEXTS_FOLDER)
    names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    texts = [folder.joinpath(n).read_text("utf-8") for n in names if n.endswith(".md")]
    questions = package.joinpath(QUESTIONS_FILE)
    if not texts or not questions.is_file():
        missing = f"{TEXTS_FOLDER}/*.md" if not texts else QUESTIONS_FILE
        raise ConfigError(
            f"the installation of labkit is incomplete: {package} has no {missing}; reinstall it"
        )
    return (*texts, *_strings(json.loads(questions.read_text("utf-8"))))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
