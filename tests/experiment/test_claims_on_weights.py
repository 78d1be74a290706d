"""Claims on the form of a model's weights, checked by its files' headers before any run."""

import json
import struct
from pathlib import Path

import pytest

from labkit.config import ConfigError

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
QUANTISED = {"layer.weight": ("U32", [8, 8]), "layer.scales": ("F16", [8, 2])}
HALF = {"layer.weight": ("BF16", [8, 64]), "norm.weight": ("F32", [64])}
WHOLE = {"layer.weight": ("F32", [8, 64])}


@pytest.fixture(autouse=True)
def no_metal(monkeypatch):
    """On Metal MLX keeps half precision."""
    monkeypatch.setattr("labkit.engine.model.dtype_resolution.mlx_gpu", lambda: None)


@pytest.fixture
def model(tmp_path):
    """Return what writes a model of these tensors, all zeros, and names it as a config does."""

    def write(tensors):
        header, at = {}, 0
        for name, (word, shape) in tensors.items():
            end = at + SIZES[word] * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": word, "shape": shape, "data_offsets": [at, end]}
            at = end
        head = json.dumps(header).encode()
        file = struct.pack("<Q", len(head)) + head + bytes(at)
        (tmp_path / "model.safetensors").write_bytes(file)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 300}')
        (tmp_path / "tokenizer.json").write_text("{}")
        return ["model=local", f"model.path={tmp_path}"]

    return write


@pytest.mark.parametrize("tensors", [QUANTISED, HALF], ids=["quantised", "half"])
def test_a_claim_on_narrow_weights_reads_any_model_s_headers(composed, model, tensors):
    assert [arm.name for arm in composed("ablation=weights", *model(tensors)).arms] == [
        *("float32", "model", "control")
    ]


def test_a_model_in_float32_is_refused_before_anything_runs(composed, model):
    for overrides in (["model=tiny"], ["model=small", "engine=mlx_lm"], model(WHOLE)):
        with pytest.raises(ConfigError, match=r"^ablation\.claims\.engaged\.model: weights\.narr"):
            composed("ablation=weights", *overrides)


def test_the_error_names_the_forms_of_the_weights(composed, model):
    claim = "ablation.claims.engaged.model=[weights.quantised]"
    with pytest.raises(ConfigError, match="all weights of model=local are held in bfloat16 and fl"):
        composed("ablation=weights", claim, *model(HALF))
    composed("ablation=weights", claim, *model(QUANTISED))


def test_the_forms_of_an_impossible_quantisation_are_unknown(composed, model):
    """Loading the model says what is wrong with it."""
    overrides = model(QUANTISED)
    config = Path(overrides[1].partition("=")[2], "config.json")
    quantization = '"quantization": {"bits": 4, "group_size": Infinity}'
    config.write_text(f'{{"model_type": "qwen3", "vocab_size": 300, {quantization}}}')
    composed("ablation=weights", *overrides)


def test_a_form_that_mlx_lm_casts_is_refused_for_mlx_lm(composed, model):
    """On a CPU it multiplies in float32, whatever lies in the file."""
    half = ["ablation=weights", "engine=mlx_lm", *model(HALF)]
    with pytest.raises(ConfigError, match="are held in float32 here"):
        composed(*half)
    composed("ablation=weights", "engine=mlx_lm", *model(QUANTISED))


def test_a_claim_on_weights_without_a_model_is_refused(composed):
    with pytest.raises(ConfigError, match="because workload=kernel_decode loads no model"):
        composed("ablation=weights", "workload=kernel_decode", "model=tiny")
