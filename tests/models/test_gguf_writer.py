"""What is exported as GGUF, and what is refused because the file could not hold it."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from labkit.config import ConfigError
from labkit.models import safetensors_io
from labkit.models.gguf import gguf_writer
from labkit.models.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS
from labkit.models.synthetic import train_bpe

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
}


class Recorder:
    """Takes the place of ``gguf.GGUFWriter``, and keeps what it is given."""

    def __init__(self):
        self.tensors, self.keys = {}, {}

    def add_tensor(self, name, tensor):
        self.tensors[name] = tensor

    def __getattr__(self, name):
        return lambda *values: self.keys.update({name: values})


def write_model(folder, config, tokenizer=None):
    trained = train_bpe.train(["so it goes"], vocab_size=300, seed=0)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(trained if tokenizer is None else tokenizer.to_str())


def refusal(tmp_path, config=LLAMA, tokenizer=None):
    """Return why a model is refused; it has no weights, and is refused before they are read."""
    write_model(tmp_path, config, tokenizer)
    with pytest.raises(ConfigError) as caught:
        gguf_writer.export_gguf(tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "phi3"}, "phi3"),
        ({"quantization": {"bits": 4}}, "a quantised llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a quantised llama"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama with RoPE scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "llama with RoPE scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "llama with RoPE scaling"),
        (
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            "llama with sliding windows",
        ),
        ({"max_position_embeddings": None}, "llama without max_position_embeddings"),
    ],
)
def test_a_model_that_the_file_could_not_hold_is_one_line(tmp_path, change, reason):
    assert f"and this is {reason}; name a GGUF" in refusal(tmp_path, LLAMA | change)


def bpe(*parts, **options):
    built = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], **options))
    if parts:
        built.pre_tokenizer = pre_tokenizers.Sequence([*parts])
    return built


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (bpe(byte_fallback=True), "and this is SentencePiece (byte fallback); name a GGUF"),
        (Tokenizer(models.Unigram([("a", 0.0)], 0)), "and this is Unigram; name a GGUF"),
        (bpe(pre_tokenizers.Metaspace()), "no pre-tokenizer like the tokenizer's Metaspace; name"),
        (
            bpe(
                pre_tokenizers.Split(Regex("x+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ),
            "no pre-tokenizer like the tokenizer's Split + ByteLevel (patterns 'x+'); name",
        ),
        (
            bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), ignore_merges=True),
            " that ignores merges; name",
        ),
        (bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)), "tokenizer's ByteLevel; name"),
    ],
)
def test_a_tokenizer_that_the_file_could_not_hold_is_one_line(tmp_path, tokenizer, reason):
    assert reason in refusal(tmp_path, tokenizer=tokenizer)


def pre_tokenizer_name(tokenizer):
    return gguf_writer._pre_tokenizer_name(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_of_llama_cpp_is_found_again(name):
    pre = PRE_TOKENIZERS[name]
    tokenizer = bpe(ignore_merges=pre.ignores_merges)
    tokenizer.pre_tokenizer = pre.build()
    found = PRE_TOKENIZERS[pre_tokenizer_name(tokenizer)]
    assert found.patterns == pre.patterns and found.ignores_merges == pre.ignores_merges


def test_gpt_2_s_and_smollm_s_own_files_are_found():
    """As their tokenizer.json has them: ByteLevel splits with GPT-2's pattern by itself."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert pre_tokenizer_name(bpe(words)) == "gpt-2"
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert pre_tokenizer_name(bpe(digits, words)) == "smollm"
    tokenizer = bpe()
    tokenizer.pre_tokenizer = words
    assert pre_tokenizer_name(tokenizer) == "gpt-2"


def test_bfloat16_and_float16_tensors_are_exported_as_float32(tmp_path):
    numbers = np.arange(8, dtype=np.float32) - 3.5
    arrays = {
        "model.norm.weight": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        "lm_head.weight": numbers.astype(np.float16),
    }
    safetensors_io.write(tmp_path / "model.safetensors", arrays)
    writer = Recorder()
    gguf_writer._write_tensors(writer, tmp_path, LLAMA)
    assert writer.tensors.keys() == {"output_norm.weight", "output.weight"}
    for tensor in writer.tensors.values():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, numbers)


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({}, 1e4),
    ],
)
def test_the_base_of_rope_is_found_where_transformers_wrote_it(change, theta):
    writer = Recorder()
    gguf_writer._add_metadata(writer, LLAMA | change)
    assert writer.keys["add_rope_freq_base"] == (theta,)


def test_a_llama_may_leave_out_what_mlx_lm_has_a_default_for():
    writer = Recorder()
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    gguf_writer._add_metadata(writer, config)
    assert writer.keys["add_head_count_kv"] == writer.keys["add_head_count"] == (2,)


@pytest.mark.parametrize("ends", [None, -1, LLAMA["vocab_size"]])
def test_a_model_without_a_token_that_ends_a_request_is_one_line(tmp_path, ends):
    reason = refusal(tmp_path, LLAMA | {"eos_token_id": ends})
    assert "the model has no token that ends a request" in reason


@pytest.fixture
def export(tmp_path, monkeypatch, no_cache):
    """Export a model without weights; return the keys that its file gets."""

    def exported(config, tokenizer=None, **files):
        folder, writer = tmp_path / "model", Recorder()
        folder.mkdir()
        write_model(folder, config, tokenizer)
        for name, value in files.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
        safetensors_io.write(folder / "model.safetensors", {})
        monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFWriter=lambda *_: writer))
        monkeypatch.setattr(gguf_writer, "check_package", lambda: None)
        gguf_writer.export_gguf(folder)
        return writer.keys

    return exported


@pytest.mark.parametrize(
    ("config", "files", "ids"),
    [
        ({"eos_token_id": 7, "bos_token_id": 6}, {}, {"bos": 6, "eos": 7}),
        ({"eos_token_id": [8, 7]}, {}, {"eos": 7, "eot": 8}),
        ({}, {"tokenizer_config": {"eos_token": "<|eos|>"}}, {"eos": 299}),
        (
            {"eos_token_id": [7, 299]},
            {"tokenizer_config": {"eos_token": "<|eos|>"}},
            {"eos": 299, "eot": 7},
        ),
        ({}, {"generation_config": {"eos_token_id": [1, 2, 3]}}, {"eos": 1, "eot": 2, "eom": 3}),
        ({"eos_token_id": [300, 7]}, {}, {"eos": 7}),
    ],
)
def test_all_tokens_that_end_a_request_are_written(export, config, files, ids):
    keys = export(LLAMA | config, **files)
    names = ("bos", "eos", "eot", "eom")
    added = {name: keys.get(f"add_{name}_token_id") for name in names}
    assert {name: given[0] for name, given in added.items() if given} == ids


def test_added_tokens_are_control_tokens_only_if_they_are_special(export):
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<think>"])
    keys = export(LLAMA | {"vocab_size": 4, "eos_token_id": 1}, tokenizer)
    assert keys["add_token_list"] == (["a", "<|end|>", "<think>", "[PAD3]"],)
    assert keys["add_token_types"] == ([1, 3, 4, 1],)
