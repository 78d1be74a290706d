import json
import subprocess
import sys

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from labkit.config import ConfigError, Model
from labkit.engine import model_loader
from labkit.models import resolve
from labkit.models.gguf import gguf_architectures, gguf_header, gguf_quants, gguf_to_mlx_lm


def local(path):
    return resolve(Model(name="local", path=str(path)))


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
    targets = gguf_architectures.read_architecture(gguf_header.read_header(path)).targets()
    compared = 0
    for name, target in targets.items():
        for part in ("weight", "scales", "biases"):
            expected = theirs.get(f"{name.removesuffix('.weight')}.{part}")
            converted = ours.get(f"{target.path}.{part}")
            assert (expected is None) == (converted is None)
            if expected is not None:
                expected = np.array(expected)
                assert expected.dtype == converted.dtype
                assert expected.tobytes() == converted.tobytes(), f"{name} {part}"
                compared += 1
    assert compared == len(ours) >= len(targets)


def blocks_of_256(path, kind, size, halves):
    """Return six random blocks, with float16 scales from byte ``halves`` on, and their weights."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (6, size), dtype=np.uint8)
    for start in range(halves, min(halves + 4, size), 2):
        scales = rng.uniform(1e-3, 1e-2, (6, 1)).astype("<f2")
        blocks[:, start : start + 2] = scales.view("u1")
    gguf_files.write(path, {"a": 1}, {"t": (kind, (3, 512), blocks.tobytes())})
    file = gguf_header.read_header(path)
    tensor = file.tensors["t"]
    return blocks, gguf_quants.convert_blocks(tensor.type.name, file.blocks(tensor))["weight"]


@pytest.mark.parametrize(("kind", "size", "halves"), [(10, 84, 80), (14, 210, 208)])
def test_k_quants_become_the_float16_of_mlxs_reader(tmp_path, kind, size, halves):
    path = tmp_path / "k.gguf"
    _, ours = blocks_of_256(path, kind, size, halves)
    theirs = np.array(mx.load(str(path))["t"])
    assert ours.dtype == theirs.dtype == np.float16
    assert ours.tobytes() == theirs.tobytes()


def test_q4_k_equals_ggmls_dequantisation(tmp_path):
    """Compared with ggml's ``dequantize_row_q4_K``; mlx 0.32.4 misreads every second group."""
    blocks, ours = blocks_of_256(tmp_path / "k.gguf", 12, 144, 0)

    def value(block, index):
        group, scales = index // 32, block[4:16].astype(int)
        d, least = (float(block[at : at + 2].view("<f2")[0]) for at in (0, 2))
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = scales[group + 4] & 15 | scales[group - 4] >> 6 << 4
            minimum = scales[group + 4] >> 4 | scales[group] >> 6 << 4
        byte = int(block[16 + 32 * (group // 2) + index % 32])
        return d * scale * (byte >> 4 if group % 2 else byte & 15) - least * minimum

    plain = [value(block, index) for block in blocks for index in range(256)]
    np.testing.assert_allclose(ours.ravel(), plain, rtol=1e-3, atol=1e-5)


def test_bfloat16_weights_stay_exact(tmp_path, no_cache):
    """NumPy has no bfloat16; float32 represents every bfloat16 exactly."""
    tensors = gguf_files.tensors(kind=gguf_files.BF16, name="qwen3")
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.metadata("qwen3"), tensors)
    widened = weights(local(path).path)["model.layers.1.mlp.up_proj.weight"]
    stored = np.frombuffer(tensors["blk.1.ffn_up.weight"][2], "<u2").reshape(widened.shape)
    assert widened.dtype == np.float32
    assert (widened.view("<u4") == stored.astype("<u4") << 16).all()


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
    assert widened.eos_token_ids == (2,)
    assert widened.vocab_size == len(gguf_files.vocabulary()[0])
    loaded = model_loader.load_model(widened.path)
    assert loaded.model_type == name
    assert loaded.eos_token_ids == {2}
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
    folder = tmp_path / "parts"
    folder.mkdir()
    file = gguf_header.read_header(path)
    gguf_to_mlx_lm.write_model(file, gguf_architectures.read_architecture(file), folder)
    files = sorted(folder.glob("model*.safetensors"))
    assert len(files) > 2
    parts = {name: array for part in files for name, array in load_file(part).items()}
    assert {n: a.tobytes() for n, a in parts.items()} == {n: a.tobytes() for n, a in whole.items()}
    model_loader.load_model(folder)


def test_an_invalid_file_is_one_line_that_names_the_option(tmp_path, no_cache):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"not one")
    with pytest.raises(ConfigError) as error:
        local(path)
    assert str(error.value) == f"model.path={path}: not a GGUF file"
    gguf_files.model(path, tokenizer__ggml__model="llama")
    with pytest.raises(ConfigError, match=r"tokenizer 'llama' is not supported; must be gpt2"):
        local(path)
    assert not any((no_cache / "models").iterdir())


def test_conversion_does_not_import_mlx(tmp_path, no_cache):
    path = gguf_files.model(tmp_path / "m.gguf")
    code = (
        "import sys; from labkit.config import Model; from labkit.models import resolve\n"
        f"resolve(Model(name='local', path={str(path)!r}))\n"
        "print([n for n in ('mlx', 'mlx_lm', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
