import json
import math
import subprocess
import sys

import numpy as np
import pytest
from small_models import CONFIGS, build_model_dir

from labkit.engine.engine_protocol import EngineError
from labkit.engine.model import model_loader, unpatched_loader
from labkit.engine.model.dtype_resolution import MatrixStorage, WeightLoading
from labkit.engine.model.model_loader import load_model
from labkit.models.synthetic import train_bpe


def in_fresh_process(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("first", ["plain", "ours"])
def test_mlx_lm_s_own_modules_are_not_patched(model_dir, first):
    """Whichever was there first; loading imports neither transformers nor the package's init."""
    code = """
import sys
from pathlib import Path
from unittest.mock import MagicMock
from labkit.engine.model.model_loader import load_model
ours = None
if sys.argv[2] == "ours":
    ours = type(load_model(Path(sys.argv[1])).model)
    assert not {"transformers", "mlx_lm.utils"} & sys.modules.keys()
for part in ("transformers", "transformers.tokenization_utils_base"):
    sys.modules[part] = MagicMock()  # takes 1 s to import, and nothing here uses it
if ours:
    import mlx_lm.generate
    from mlx_lm import generate, load
    assert (generate.__name__, load.__name__) == ("generate", "load") and mlx_lm.__version__ > "0"
import mlx_lm.models.base as base
import mlx_lm.models.qwen3 as qwen3
names = dict(vars(base)), dict(vars(qwen3))
ours = ours or type(load_model(Path(sys.argv[1])).model)
print(names == (vars(base), vars(qwen3)))
print(qwen3.scaled_dot_product_attention is base.scaled_dot_product_attention)
print(base.scaled_dot_product_attention.__module__, ours is qwen3.Model, ours.__module__)
"""
    printed = in_fresh_process(code, model_dir("qwen3"), first)
    assert printed == ["True", "True", "mlx_lm.models.base", "False", "mlx_lm.models.qwen3"]


def test_models_of_one_process_are_of_one_class(model_dir):
    first, second = (load_model(model_dir("qwen3")).model for _ in range(2))
    assert type(first) is type(second)


def test_windows_come_from_the_models_own_caches(model_dir):
    assert load_model(model_dir("gemma3")).windows == (11, 11, None)
    assert load_model(model_dir("qwen3")).windows == (None, None, None)
    assert load_model(model_dir("qwen3")).eos_token_ids == {299}


def copy_with(model_dir, tmp_path, **changes):
    settings = json.loads((model_dir("qwen3") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").symlink_to(model_dir("qwen3") / "model.safetensors")
    return tmp_path


def test_generation_config_names_the_end_of_text_as_in_mlx_lm(model_dir, tmp_path):
    path = copy_with(model_dir, tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_model(path).eos_token_ids == {7, 8}


def test_tagged_floats_of_transformers_5_are_numbers(model_dir, tmp_path):
    """Here as in mlx_lm, whose load_config decodes them."""
    from mlx_lm.utils import load_config

    tagged = {"rms_norm_eps": {"__float__": "Infinity"}, "x": [{"__float__": "NaN"}]}
    path = copy_with(model_dir, tmp_path, **tagged, y={"__float__": "1"})
    assert load_model(path).model.args.rms_norm_eps == math.inf
    decoded = model_loader._read_config(path)
    assert repr(decoded) == repr(load_config(path)) and math.isnan(decoded["x"][0])


def test_half_precision_weights_become_float32(model_dir, tmp_path):
    import mlx.core as mx
    from mlx.utils import tree_flatten

    path = copy_with(model_dir, tmp_path)
    weights = mx.load(str(path / "model.safetensors"))
    (path / "model.safetensors").unlink()
    mx.save_safetensors(
        str(path / "model.safetensors"), {k: v.astype(mx.bfloat16) for k, v in weights.items()}
    )
    kinds = {value.dtype for _, value in tree_flatten(load_model(path).model.parameters())}
    assert kinds == {mx.float32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such"}, "model_type=no_such: mlx_lm has no such architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "not by mlx_lm"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "fp3"}},
            "quantisation mode fp3; must be one of: affine, mxfp4, nvfp4, mxfp8, q2_k",
        ),
        (
            {
                "quantization": {
                    "bits": 4,
                    "group_size": 32,
                    "model.layers.1.mlp.up_proj": {"bits": 4, "group_size": 32, "mode": "fp3"},
                }
            },
            r"mode fp3 of layer model\.layers\.1\.mlp\.up_proj; must be one of",
        ),
        (
            {"quantization": {"bits": 4, "group_size": 32}, "quantize_activations": True},
            "quantize_activations is set, and engine=paged .* set engine=mlx_lm$",
        ),
        ({"hidden_size": 128}, "shape"),
        ({"num_attention_heads": 0}, r"does not describe a whole model \(.*division by zero"),
        (
            {"num_hidden_layers": 4},
            r"Missing 11 parameters: model\.layers\.3\.input_layernorm\.weight, .* and 7 more$",
        ),
    ],
)
def test_unloadable_models_are_refused_in_one_line(model_dir, tmp_path, changes, words):
    with pytest.raises(EngineError, match=words) as caught:
        load_model(copy_with(model_dir, tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "division by zero"),
        ({"rope_parameters": "none"}, "has no attribute"),
    ],
)
def test_mlx_lm_s_loader_refuses_them_in_one_line(model_dir, tmp_path, changes, words):
    with pytest.raises(EngineError, match=f"^engine=mlx_lm: .*{words}") as caught:
        unpatched_loader.load(copy_with(model_dir, tmp_path, **changes))
    assert "\n" not in str(caught.value)


MODES = {
    "mxfp4": {"mode": "mxfp4", "group_size": 32, "bits": 4},
    "nvfp4": {"mode": "nvfp4", "group_size": 16, "bits": 4},
    "mxfp8": {"mode": "mxfp8", "group_size": 32, "bits": 8},
    "affine": {"group_size": 32, "bits": 5},
}


def matrices(model):
    """Return the float32 weights of all matrices, by path."""
    from labkit.engine.model.dequantized_layers import MATRIX_LAYERS, dequantized_weight

    return {
        path: np.array(dequantized_weight(layer))
        for path, layer in model.named_modules()
        if type(layer) in MATRIX_LAYERS
    }


@pytest.mark.parametrize("mode", MODES)
def test_mlx_s_quantisation_modes_load(tmp_path, mode):
    from mlx_lm.utils import load_model as load_plain

    path = build_model_dir(tmp_path, {**CONFIGS["qwen3"], "quantization": MODES[mode]})
    ours = load_model(path, WeightLoading(matrix_storage=MatrixStorage.as_stored)).model
    assert ours.model.layers[0].mlp.up_proj.mode == mode
    plain, _ = load_plain(path)
    theirs = matrices(plain)
    assert len(theirs) > 10
    for path, weight in matrices(ours).items():
        np.testing.assert_array_equal(weight, theirs[path])


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_bits_that_config_json_does_not_name_are_those_of_the_weights(tmp_path, mode):
    """As in mlx_lm, which infers them: the entry without a name is only a default."""
    from mlx_lm.utils import load_model as load_plain

    path = build_model_dir(tmp_path, {**CONFIGS["qwen3"], "quantization": MODES[mode]})
    settings = json.loads((path / "config.json").read_text())
    settings["quantization"] = {"group_size": 64, "bits": 4}
    (path / "config.json").write_text(json.dumps(settings))
    ours, (plain, _) = load_model(path).model, load_plain(path)
    one, other = (model.model.layers[1].mlp.down_proj for model in (ours, plain))
    assert (one.mode, one.bits, one.group_size) == (other.mode, other.bits, other.group_size)
    assert (one.mode, one.bits) == (mode, MODES[mode]["bits"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_quantisation_modes_give_the_tokens_of_float32(tmp_path, mode):
    from labkit.engine import LLM, SamplingParams

    path = build_model_dir(tmp_path, {**CONFIGS["qwen3"], "quantization": MODES[mode]})
    (path / "tokenizer.json").write_text(train_bpe.train(["so it goes"], vocab_size=270, seed=0))
    params, tokens = SamplingParams(max_tokens=9, ignore_eos=True), []
    for weights in ("model", "float32"):
        with LLM(path, weights=weights, blocks=16) as llm:
            tokens.append([out.token_ids for out in llm.generate([[1, 2, 3], [4]], params)])
            counters = llm.counters()
            assert counters.get("forward.replayed", 0) > 0
    assert tokens[0] == tokens[1]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(EngineError):
        load_model(tmp_path)
