"""Shapes of models for the widgets: labkit's own, and the published ones of Qwen3."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from labkit import config
from labkit.engine import memory_budget
from labkit.engine.memory_budget import ModelFootprint, model_footprint
from labkit.engine.model.dtype_resolution import WeightLoading

CONF = Path(__file__).parents[3] / "conf" / "model"
BUILT = ("tiny", "small", "qwen3_0.6b")  # conf/model/NAME.yaml
# From the config.json of each model on the Hugging Face hub; 151,936 tokens, 8 KV heads of 128.
# Hidden size, layers, query heads, hidden size of the feed-forward block.
QWEN3 = {
    "Qwen3-1.7B": (2048, 28, 16, 6144),
    "Qwen3-4B": (2560, 36, 32, 9728),
    "Qwen3-8B": (4096, 36, 32, 12288),
    "Qwen3-14B": (5120, 40, 40, 17408),
    "Qwen3-32B": (5120, 64, 64, 25600),
}
DTYPE = "bfloat16"
ENGINE = config.Engine(kv=config.KV(dtype=config.KVDType.bfloat16))


def shapes() -> dict[str, config.ModelShape]:
    """Return the shape of each model by name, smallest first."""
    built = {
        name: config.ModelShape(**OmegaConf.load(CONF / f"{name}.yaml")["shape"]) for name in BUILT
    }
    published = {
        name: config.ModelShape(
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=inner,
            vocab_size=151_936,
        )
        for name, (hidden, layers, heads, inner) in QWEN3.items()
    }
    return built | published


def footprints() -> dict[str, ModelFootprint]:
    """Return each model's sizes, with weights, keys and values in 16 bits and an untied head."""
    return {
        name: model_footprint.from_shape(shape, name, WeightLoading(DTYPE))
        for name, shape in shapes().items()
    }


def kv_bytes_per_token() -> dict[str, int]:
    """Return the bytes of one token's keys and values in all layers, by model."""
    return {
        name: memory_budget.kv_bytes_per_token(ENGINE, model)
        for name, model in footprints().items()
    }
