import json
import shutil
import subprocess
import sys

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf_files import local
from safetensors.numpy import load_file

from labkit.config import ConfigError
from labkit.engine import LLM, SamplingParams
from labkit.engine.memory_budget import model_footprint
from labkit.engine.model import model_loader
from labkit.engine.model.converted_checkpoints import (
    _widened,
    float32_directory,
    is_quantized,
    mlx_lm_directory,
)
from labkit.engine.model.dtype_resolution import MatrixStorage, WeightLoading
from labkit.models.gguf import gguf_header, gguf_model_config, gguf_to_mlx_lm
from labkit.models.gguf.gguf_writer import export_gguf

AS_STORED = WeightLoading(matrix_storage=MatrixStorage.as_stored)


def weights(folder):
    (file,) = folder.glob("model*.safetensors")
    return load_file(file)


def dequantised(arrays, path, bits):
    if f"{path}.scales" not in arrays:
        return np.asarray(arrays[f"{path}.weight"], np.float32)
    parts = [mx.array(arrays[f"{path}.{part}"]) for part in ("weight", "scales", "biases")]
    wide = [part.astype(mx.float32) for part in parts[1:]]
    return np.array(mx.dequantize(parts[0], *wide, group_size=32, bits=bits))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_weights_are_bitwise_those_of_mlxs_reader(tmp_path, no_cache, kind):
    tensors = gguf_files.tensors(kind=getattr(gguf_files, kind), name="qwen3")
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata("qwen3"), tensors)
    ours, theirs = weights(local(path).path), mx.load(str(path))
    targets = gguf_model_config.read_architecture(gguf_header.read_header(path)).targets()
    compared = 0
    for target in targets:
        name = target.tensor
        for part in ("weight", "scales", "biases"):
            expected = theirs.get(f"{name.removesuffix('.weight')}.{part}")
            converted = ours.get(f"{target.path}.{part}")
            assert (expected is None) == (converted is None)
            if expected is not None:
                expected = np.array(expected)
                assert expected.dtype == converted.dtype
                assert expected.tobytes() == converted.tobytes(), f"{name} {part}"
                compared += 1
    assert compared == len(ours) >= 20


def test_bfloat16_weights_stay_bfloat16(tmp_path, no_cache):
    """NumPy has no bfloat16, so the file is read by MLX."""
    tensors = gguf_files.tensors(kind=gguf_files.BF16, name="qwen3")
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata("qwen3"), tensors)
    (file,) = local(path).path.glob("model*.safetensors")
    weight = mx.load(str(file))["model.layers.1.mlp.up_proj.weight"]
    assert weight.dtype == mx.bfloat16
    assert np.array(weight.view(mx.uint16)).tobytes() == tensors["blk.1.ffn_up.weight"][2]


# The type of a model's matrices, and the type of its embedding.
K_QUANTS = [
    ("Q4_K", "Q6_K"),
    ("Q2_K", "Q6_K"),
    ("Q3_K", "Q5_K"),
    ("IQ4_XS", "Q5_K"),
    ("IQ4_NL", "Q5_1"),
    ("MXFP4", "Q5_0"),
]


@pytest.mark.parametrize(
    ("kind", "embedding"),
    [K_QUANTS[0], *(pytest.param(*names, marks=pytest.mark.slow) for names in K_QUANTS[1:])],
)
def test_block_formats_are_read_as_they_lie(tmp_path, no_cache, kind, embedding):
    """Tokens, greedy and the same as with float32 weights; the bytes are the file's."""
    kinds = [getattr(gguf_files, name) for name in (kind, embedding)]
    sizes = {"hidden": 256, "inner": 512}
    tensors = gguf_files.tensors("llama", kinds[0], kinds[1], **sizes)
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata("llama", **sizes), tensors)
    prompts = [[1, 20, 30, 40], [5], [200, 7, 9]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs, counters = [], []
    for weights_option in ("model", "float32"):
        with LLM(path, weights=weights_option, blocks=16) as llm:
            outputs.append([output.token_ids for output in llm.generate(prompts, params)])
            counters.append(llm.counters())
    assert outputs[0] == outputs[1]
    in_file = sum(len(data) for kind, _, data in tensors.values() if kind != gguf_files.F32)
    assert counters[0]["weights.quantised"] < 1.15 * in_file
    assert "weights.float32" not in counters[0] and "weights.quantised" not in counters[1]


@pytest.fixture
def k_quant_directory(tmp_path, no_cache):
    """A converted model with every kind of block format."""
    return block_directory(tmp_path)


def block_directory(tmp_path, mxfp4="MXFP4"):
    sizes = {"hidden": 256, "inner": 512}
    tensors = gguf_files.tensors("llama", gguf_files.Q4_K, gguf_files.Q6_K, **sizes)
    rng = np.random.default_rng(3)
    names = ("Q2_K", "Q3_K", "Q5_K", "IQ4_NL", "IQ4_XS", mxfp4, "Q5_0")
    for number, name in enumerate(names):
        part = ("ffn_up", "ffn_gate", "ffn_down", "attn_v")[number // 2]
        place = f"blk.{number % 2}.{part}.weight"
        kind = getattr(gguf_files, name)
        tensors[place] = gguf_files.matrix(kind, tensors[place][1], rng)
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata("llama", **sizes), tensors)
    return local(path).path


def test_stock_mlx_lm_loads_a_copy_with_the_same_numbers(k_quant_directory):
    from mlx_lm.utils import load_model as load_plain

    from labkit.engine.model.dequantized_layers import MATRIX_LAYERS, dequantized_weight

    copy = mlx_lm_directory(k_quant_directory)
    assert copy != k_quant_directory and mlx_lm_directory(copy) == copy
    assert {file.name for file in copy.iterdir()} == {
        file.name for file in k_quant_directory.iterdir()
    }
    plain, _ = load_plain(copy)
    ours = model_loader.load_model(k_quant_directory, AS_STORED).model
    layers = dict(ours.named_modules())
    formats = set()
    for path, layer in plain.named_modules():
        if type(layer) in MATRIX_LAYERS:
            formats.add(getattr(layers[path], "mode", None))
            expected = np.array(dequantized_weight(layers[path]))
            np.testing.assert_array_equal(np.array(dequantized_weight(layer)), expected)
    gguf_block_formats = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"}
    assert formats == {*gguf_block_formats, "mxfp4", "affine"}


def test_other_weights_in_a_folder_of_the_same_name_have_a_copy_of_their_own(
    k_quant_directory, tmp_path
):
    """A user may copy a converted directory out of the cache."""
    folders = [tmp_path / name / "model" for name in ("a", "b")]
    for folder in folders:
        shutil.copytree(k_quant_directory, folder)
    config = folders[1] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5e5}))
    copies = [mlx_lm_directory(folder) for folder in folders]
    bases = [json.loads((copy / "config.json").read_text())["rope_theta"] for copy in copies]
    assert bases == [1e4, 5e5]
    assert mlx_lm_directory(folders[0]) == copies[0]


def test_a_float32_copy_has_the_same_numbers_and_no_quantisation(tmp_path, no_cache):
    """Its names are those of transformers, so that a server without MLX loads it."""
    from mlx_lm.utils import load_model as load_plain

    from labkit.engine.model.dequantized_layers import MATRIX_LAYERS, dequantized_weight

    folder = block_directory(tmp_path, mxfp4="Q8_0")
    copy = float32_directory(folder)
    assert is_quantized(folder) and not is_quantized(copy)
    settings = json.loads((copy / "config.json").read_text("utf-8"))
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert {str(array.dtype) for array in weights(copy).values()} == {"float32"}
    plain, _ = load_plain(copy)
    ours = model_loader.load_model(folder, AS_STORED).model
    layers = dict(ours.named_modules())
    for path, layer in plain.named_modules():
        if type(layer) in MATRIX_LAYERS:
            expected = np.array(dequantized_weight(layers[path]))
            near = 1e-6 * np.abs(expected).max()
            np.testing.assert_allclose(np.array(layer.weight), expected, rtol=0, atol=near)


def test_an_exported_llama_is_read_back_with_the_same_numbers(tmp_path, no_cache):
    pytest.importorskip("gguf")  # the extra llamacpp
    folder = float32_directory(local(gguf_files.model(tmp_path / "m.gguf")).path)
    back = local(export_gguf(folder)).path
    numbers, again = weights(folder), weights(back)
    assert numbers.keys() == again.keys()
    for name, array in numbers.items():
        np.testing.assert_array_equal(again[name], array)
    words = [json.loads((path / "tokenizer.json").read_text("utf-8")) for path in (folder, back)]
    for key in ("pre_tokenizer", "added_tokens"):
        assert words[0][key] == words[1][key]
    generation = [(path / "generation_config.json").read_text("utf-8") for path in (folder, back)]
    assert generation[0] == generation[1]


def test_a_format_that_is_not_widened_is_one_line(k_quant_directory, tmp_path):
    with pytest.raises(ConfigError, match="has MLX's format mxfp4, which is not widened to float3"):
        float32_directory(k_quant_directory)
    assert not list(tmp_path.rglob("*float32*"))


def test_words_whose_scales_are_in_another_file_are_refused():
    """They are no numbers without them."""
    words = {"layers.0.mlp.weight": np.zeros((4, 4), np.uint32)}
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp has its scales in another file"):
        _widened(words, {"bits": 4, "group_size": 32})


@pytest.mark.parametrize("storage", MatrixStorage)
def test_a_plan_counts_the_bytes_of_block_formats(k_quant_directory, storage):
    from mlx.utils import tree_flatten

    model = model_loader.load_model(k_quant_directory, WeightLoading(matrix_storage=storage)).model
    loaded = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    planned = model_footprint.from_directory(
        k_quant_directory, WeightLoading("float32", storage)
    ).weight_bytes
    # Without kernels of labkit's own, Q4_K and Q5_K are smaller than planned: integers.
    assert planned == loaded if storage is not MatrixStorage.cast else planned > loaded


def test_engines_of_mlx_run_the_same_numbers(k_quant_directory):
    """As loaded for MLX, which has no product with block formats."""
    ids = mx.array([[1, 20, 30]])
    logits = [
        np.array(
            model_loader.load_model(k_quant_directory, WeightLoading(matrix_storage=storage)).model(
                ids
            )
        )
        for storage in (MatrixStorage.cast, MatrixStorage.dequantized)
    ]
    np.testing.assert_allclose(*logits, atol=1e-4 * np.ptp(logits[0]))
    layer = (
        model_loader.load_model(k_quant_directory, AS_STORED).model.model.layers[0].self_attn.q_proj
    )
    with pytest.raises(TypeError, match="MLX cannot multiply by a q4_k matrix"):
        layer(mx.zeros((1, 256)))


@pytest.mark.parametrize("part", ["q", "k"])
def test_interleaved_rope_rows_become_halves(tmp_path, no_cache, part):
    """Equal scores: the file's rows with MLX's traditional RoPE, ours with the other."""
    path = gguf_files.model(tmp_path / "m.gguf")
    ours, theirs = weights(local(path).path), dict(mx.load(str(path)))
    theirs = {name: np.array(value) for name, value in theirs.items()}
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 5, gguf_files.HIDDEN), np.float32)

    def scores(arrays, names, traditional):
        sides = []
        for name, heads in zip(names, (gguf_files.HEADS, gguf_files.KV_HEADS), strict=True):
            side = x @ dequantised(arrays, name, 4).T
            side = mx.array(side.reshape(1, 5, heads, gguf_files.HEAD_DIM)).transpose(0, 2, 1, 3)
            rope = mx.fast.rope(
                side, gguf_files.HEAD_DIM, traditional=traditional, base=1e4, scale=1.0, offset=3
            )
            sides.append(np.array(rope))
        queries, keys = sides
        return queries[:, ::2] @ keys.swapaxes(2, 3)

    by_neighbours = scores(theirs, ["blk.0.attn_q", "blk.0.attn_k"], True)
    prefix = "model.layers.0.self_attn"
    by_halves = scores(ours, [f"{prefix}.q_proj", f"{prefix}.k_proj"], False)
    np.testing.assert_allclose(by_halves, by_neighbours, atol=1e-4)
    wrong = scores(ours, [f"{prefix}.q_proj", f"{prefix}.k_proj"], True)
    assert np.abs(wrong - by_neighbours).max() > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_loads_and_computes(tmp_path, no_cache, name, tied):
    tensors = gguf_files.tensors(name)
    if not tied:
        tensors["output.weight"] = tensors["token_embd.weight"]
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata(name), tensors)
    widened = local(path)
    assert widened.name == "m"
    assert widened.eos_token_ids == (0, 2)
    assert widened.vocab_size == len(gguf_files.vocabulary()[0])
    loaded = model_loader.load_model(widened.path)
    assert loaded.model_type == name
    assert loaded.eos_token_ids == {0, 2}
    logits = np.array(loaded.model(mx.array([[1, 20, 30]])))
    assert np.isfinite(logits).all() and logits.std() > 0.01
    biased = {key for key in weights(widened.path) if key.endswith("_proj.bias")}
    assert len(biased) == (3 * gguf_files.LAYERS if name == "qwen2" else 0)


def test_config_json_has_every_layers_bit_width(tmp_path, no_cache):
    folder = local(gguf_files.model(tmp_path / "m.gguf")).path
    config = json.loads((folder / "config.json").read_text())
    embedding = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": embedding}
    assert config["tie_word_embeddings"] is True
    tensors = gguf_files.tensors(kind=gguf_files.F16, embedding=gguf_files.F32)
    path = gguf_files.write(tmp_path / "f.gguf", gguf_files.metadata(), tensors)
    assert "quantization" not in json.loads((local(path).path / "config.json").read_text())


def test_a_file_is_converted_once_and_named_by_its_content(tmp_path, no_cache, monkeypatch):
    path = gguf_files.model(tmp_path / "m.gguf")
    first = local(path)
    monkeypatch.setattr(gguf_to_mlx_lm.gguf_header, "read_header", None)
    assert local(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("LABKIT_CACHE", str(no_cache))
    changed = gguf_files.tensors(seed=1)
    gguf_files.write(path, gguf_files.metadata(), changed)
    assert local(path).digest != first.digest
    assert local(path).path != first.path


def test_large_weights_are_written_to_several_files(tmp_path, no_cache, monkeypatch):
    path = gguf_files.model(tmp_path / "m.gguf")
    whole = weights(local(path).path)
    monkeypatch.setattr(gguf_to_mlx_lm, "SHARD_BYTES", 20_000)
    folder = gguf_to_mlx_lm.convert(path, digest="0123456789abcdef", name="parts")
    files = sorted(folder.glob("model*.safetensors"))
    names = [f"model-{number:05d}.safetensors" for number in range(len(files))]
    assert len(files) > 2 and [file.name for file in files] == names
    parts = {name: array for part in files for name, array in load_file(part).items()}
    assert {n: a.tobytes() for n, a in parts.items()} == {n: a.tobytes() for n, a in whole.items()}
    model_loader.load_model(folder)


def test_an_invalid_file_is_one_line_that_names_the_option(tmp_path, no_cache):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"not one")
    with pytest.raises(ConfigError) as error:
        local(path)
    assert str(error.value) == f"model.path={path}: not a GGUF file"
    gguf_files.model(path, tokenizer__ggml__model="t5")
    with pytest.raises(ConfigError, match=r"tokenizer 't5' is not supported; must be gpt2"):
        local(path)
    assert not any((no_cache / "models").iterdir())


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.gguf: no such file"):
        LLM(tmp_path / "none.gguf")


def test_conversion_does_not_import_mlx(tmp_path, no_cache):
    path = gguf_files.model(tmp_path / "m.gguf")
    code = (
        "import sys; from labkit.config import Model; from labkit.models import resolve\n"
        f"resolve(Model(name='local', path={str(path)!r}))\n"
        "print([n for n in ('mlx', 'mlx_lm', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
