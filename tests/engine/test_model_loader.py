import json
import subprocess
import sys

import pytest

from labkit.engine.engine_protocol import EngineError
from labkit.engine.model_loader import load_model


def in_fresh_process(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_loading_imports_neither_transformers_nor_the_package_init(model_dir):
    code = """
import sys
from pathlib import Path
from labkit.engine.model_loader import load_model
load_model(Path(sys.argv[1]))
print("transformers" in sys.modules, "mlx_lm.utils" in sys.modules)
"""
    assert in_fresh_process(code, model_dir("qwen3")) == ["False", "False"]


def test_the_real_package_is_imported_afterwards(model_dir):
    code = """
import sys
from pathlib import Path
from labkit.engine.model_loader import load_model
load_model(Path(sys.argv[1]))
import mlx_lm.generate
from mlx_lm import generate, load
print(generate.__name__, load.__name__, mlx_lm.__version__ > "0")
"""
    assert in_fresh_process(code, model_dir("qwen3")) == ["generate", "load", "True"]


@pytest.mark.parametrize("first", ["plain", "ours"])
def test_mlx_lm_s_own_modules_are_not_patched(model_dir, first):
    """Whichever was there first."""
    code = """
import sys
from pathlib import Path
from labkit.engine.model_loader import load_model
ours = None if sys.argv[2] == "plain" else type(load_model(Path(sys.argv[1])).model)
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
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "mode mxfp4"),
        (
            {
                "quantization": {
                    "bits": 4,
                    "group_size": 32,
                    "model.layers.1.mlp.up_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
                }
            },
            r"mode mxfp4 of layer model\.layers\.1\.mlp\.up_proj; .* set engine=mlx_lm",
        ),
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 4}, "parameters"),
    ],
)
def test_unloadable_models_are_refused_in_one_line(model_dir, tmp_path, changes, words):
    with pytest.raises(EngineError, match=words) as caught:
        load_model(copy_with(model_dir, tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(EngineError):
        load_model(tmp_path)
