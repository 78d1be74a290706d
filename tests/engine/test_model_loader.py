import json
import subprocess
import sys

import pytest

from labkit.engine.base import EngineError
from labkit.engine.model_loader import install_attention_hook, load


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
from labkit.engine.model_loader import load
load(Path(sys.argv[1]))
print("transformers" in sys.modules, "mlx_lm.utils" in sys.modules)
"""
    assert in_fresh_process(code, model_dir("qwen3")) == ["False", "False"]


def test_the_real_package_is_imported_afterwards_and_shares_the_modules(model_dir):
    code = """
import sys
from pathlib import Path
from labkit.engine.model_loader import load
ours = type(load(Path(sys.argv[1])).model)
import mlx_lm.generate
from mlx_lm import generate, load
theirs = type(mlx_lm.utils.load_model(Path(sys.argv[1]))[0])
print(generate.__name__, load.__name__, mlx_lm.__version__ > "0", theirs is ours)
"""
    assert in_fresh_process(code, model_dir("qwen3")) == ["generate", "load", "True", "True"]


def test_the_hook_reaches_modules_imported_before_and_installs_once():
    import mlx_lm.models.base as base
    import mlx_lm.models.qwen3 as qwen3

    install_attention_hook()
    hook = base.scaled_dot_product_attention
    install_attention_hook()
    assert base.scaled_dot_product_attention is hook
    assert qwen3.scaled_dot_product_attention is hook
    assert hook.labkit_original is not hook


def test_windows_come_from_the_models_own_caches(model_dir):
    assert load(model_dir("gemma3")).windows == (11, 11, None)
    assert load(model_dir("qwen3")).windows == (None, None, None)
    assert load(model_dir("qwen3")).eos_token_ids == {299}


def copy_with(model_dir, tmp_path, **changes):
    settings = json.loads((model_dir("qwen3") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").symlink_to(model_dir("qwen3") / "model.safetensors")
    return tmp_path


def test_generation_config_names_the_end_of_text_as_in_mlx_lm(model_dir, tmp_path):
    path = copy_with(model_dir, tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load(path).eos_token_ids == {7, 8}


def test_half_precision_weights_become_float32(model_dir, tmp_path):
    import mlx.core as mx
    from mlx.utils import tree_flatten

    path = copy_with(model_dir, tmp_path)
    weights = mx.load(str(path / "model.safetensors"))
    (path / "model.safetensors").unlink()
    mx.save_safetensors(
        str(path / "model.safetensors"), {k: v.astype(mx.bfloat16) for k, v in weights.items()}
    )
    kinds = {value.dtype for _, value in tree_flatten(load(path).model.parameters())}
    assert kinds == {mx.float32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such"}, "model_type=no_such: mlx_lm has no such architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "not by mlx_lm"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "mode mxfp4"),
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 4}, "parameters"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(model_dir, tmp_path, changes, words):
    with pytest.raises(EngineError, match=words) as caught:
        load(copy_with(model_dir, tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(EngineError):
        load(tmp_path)
