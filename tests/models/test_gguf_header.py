import struct

import gguf_files
import numpy as np
import pytest

from labkit.models.gguf import GGUFError, gguf_header, gguf_model_config, gguf_tokenizer
from labkit.models.model_json import max_context


@pytest.fixture
def path(tmp_path):
    return gguf_files.model(tmp_path / "model.gguf")


def test_a_written_file_is_read_back(tmp_path):
    keys = {
        "a.text": "größer",
        "a.number": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.texts": ["x", "", "ø"],
        "a.numbers": np.arange(5, dtype="<i4"),
        "general.alignment": 64,
    }
    data = np.arange(6, dtype="<f4")
    tensors = {
        "one": (gguf_files.F32, (2, 3), data.tobytes()),
        "two": (gguf_files.F32, (3,), data[:3].tobytes()),
    }
    path = gguf_files.write(tmp_path / "a.gguf", keys, tensors, alignment=64)
    file = gguf_header.read_header(path)
    assert {k: v for k, v in file.metadata.items() if k != "a.numbers"} == {
        k: v for k, v in keys.items() if k != "a.numbers"
    }
    assert file.metadata["a.numbers"].tolist() == [0, 1, 2, 3, 4]
    one = file.tensors["one"]
    assert one.shape == (2, 3) and one.size == 24 and one.offset % 64 == 0
    assert file.blocks(one).tobytes() == data.tobytes()
    assert file.blocks(file.tensors["two"]).tobytes() == data[:3].tobytes()


def test_a_truncated_file_is_refused(path):
    whole = path.read_bytes()
    gguf_header.read_header(path)
    for end in [0, *range(1, 60), *range(60, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(GGUFError) as error:
            gguf_header.read_header(path)
        assert "\n" not in str(error.value)


def test_damage_is_refused_or_harmless(path):
    """A changed byte may give another valid file; otherwise only ``GGUFError`` is raised."""
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[int(rng.integers(0, 12_000))] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            file = gguf_header.read_header(path)
            gguf_model_config.read_architecture(file)
            gguf_tokenizer.build_tokenizer(file)
            gguf_tokenizer.tokenizer_config(file, 1)
            gguf_tokenizer.generation_config(file)
        except GGUFError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 40


def packed(version=3, tensors=0, keys=0, body=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def tensor(name, shape, kind, offset):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return gguf_files.text(name) + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4 and more", "not a GGUF file"),
        (packed(version=1), "GGUF version 1 is not supported; must be one of: 2, 3"),
        (packed(tensors=1 << 40), "claims 1099511627776 tensors"),
        (packed(keys=1 << 40), "claims 1099511627776 metadata keys"),
        (packed(keys=1, body=struct.pack("<Q", 1 << 60)), "bytes in a string"),
        (
            packed(keys=1, body=gguf_files.text("k") + struct.pack("<I", 99)),
            "value of the unknown type 99",
        ),
        (
            packed(keys=1, body=gguf_files.text("k") + struct.pack("<IIQ", 9, 0, 1 << 62)),
            "the header needs 4611686018427387904 bytes",
        ),
        (
            packed(keys=1, body=gguf_files.text("k") + struct.pack("<IIQ", 9, 8, 1 << 30)),
            "strings in k",
        ),
        (packed(keys=1, body=gguf_files.text("k") + struct.pack("<IIQ", 9, 9, 1)), "type 9"),
        (packed(keys=2, body=2 * (gguf_files.text("k") + gguf_files.value(1))), "occurs twice"),
        (packed(keys=1, body=gguf_files.text(b"\xff") + gguf_files.value(1)), "not UTF-8"),
        (packed(tensors=1, body=tensor("t", (4,), 15, 0)), "of type Q8_K; it must be one of: F32"),
        (packed(tensors=1, body=tensor("t", (4,), 77, 0)), "of type number 77"),
        (packed(tensors=1, body=tensor("t", (4,) * 5, 0, 0)), "dimensions of tensor 't'"),
        (packed(tensors=1, body=tensor("t", (), 0, 0)), "cannot have the shape"),
        (packed(tensors=1, body=tensor("t", (33, 2), 3, 0)), "Q4_1 cannot have the shape"),
        (packed(tensors=1, body=tensor("t", (1 << 63, 1 << 63), 0, 0)), "truncated: tensor t"),
        (packed(tensors=1, body=tensor("t", (4,), 0, 1 << 63)), "truncated: tensor t"),
        (
            packed(tensors=2, body=tensor("t", (4,), 0, 0) + tensor("u", (4,), 0, 8) + b"\0" * 99),
            "tensor u overlaps another",
        ),
        (
            packed(tensors=2, body=tensor("t", (4,), 0, 0) + tensor("t", (4,), 0, 32) + b"\0" * 99),
            "tensor t occurs twice",
        ),
    ],
)
def test_an_invalid_header_is_one_line(tmp_path, data, message):
    path = tmp_path / "lie.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=message) as error:
        gguf_header.read_header(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general__architecture": "mamba"},
            "architecture 'mamba' is not supported; must be one of: llama, mistral, qwen2, qwen3",
        ),
        ({"general__architecture": None}, "general.architecture is missing"),
        ({"llama__expert_count": 8}, "llama.expert_count is 8"),
        ({"llama__logit_scale": 0.5}, r"logit_scale is 0\.5; mlx_lm's llama does not compute this"),
        ({"llama__attention__scale": 0.3}, r"attention\.scale is 0\.3\d*; mlx_lm's llama does not"),
        ({"llama__attention__clamp_kqv": 8.0}, r"clamp_kqv is 8\.0; mlx_lm's llama does not"),
        ({"llama__attention__causal": False}, "causal is False; mlx_lm's llama does not"),
        ({"llama__swiglu_clamp": 7.0}, "llama.swiglu_clamp: labkit does not know this key"),
        (
            {"llama__attention__head_count_kv": np.array([2, 1], "<i4")},
            r"head_count_kv differs between layers \(1 to 2\)",
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__attention__sliding_window": 96,
            },
            "sliding_window is 96: mlx_lm's llama has no sliding window, and YaRN extends",
        ),
        ({"split__count": 3}, "one part of a split model"),
        ({"llama__block_count": 3}, "tensor blk.2.attn_norm.weight is missing"),
        ({"llama__block_count": 1}, "tensor blk.1.attn_norm.weight: mlx_lm's llama has no such"),
        ({"llama__block_count": 0}, "invalid dimensions"),
        ({"llama__block_count": 0xFFFFFFFF}, "not an integer from 0"),
        ({"llama__block_count": "2"}, "llama.block_count is of type str, not a number"),
        ({"llama__feed_forward_length": 95}, "tensor blk.0.ffn_gate.weight has shape"),
        ({"llama__attention__head_count": 0}, "invalid dimensions"),
        ({"llama__attention__head_count_kv": 3}, "invalid dimensions"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "RMS norm epsilon is nan"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, "RMS norm epsilon is 0.0"),
        ({"llama__rope__dimension_count": 8}, "it must equal the head dimension"),
    ],
)
def test_an_unsupported_model_is_one_line(tmp_path, changes, message):
    file = gguf_header.read_header(gguf_files.model(tmp_path / "m.gguf", **changes))
    with pytest.raises(GGUFError, match=message) as error:
        gguf_model_config.read_architecture(file)
    assert "\n" not in str(error.value)


def test_keys_that_change_nothing_are_accepted(tmp_path):
    """Also the same number for each layer, and YaRN's original context as llama.cpp defaults it."""
    changes = {
        "logit_scale": 1.0,
        "attention__scale": 0.25,  # of heads of 16
        "attention__clamp_kqv": 0.0,
        "attention__causal": True,
        "vocab_size": 7,
        "attention__head_count_kv": np.array([2, 2], "<i4"),
        "feed_forward_length": np.array([gguf_files.INNER] * 2, "<u4"),
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
    }
    changes = {f"llama__{key}": value for key, value in changes.items()}
    file = gguf_header.read_header(gguf_files.model(tmp_path / "m.gguf", **changes))
    config = gguf_model_config.read_architecture(file).config()
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, gguf_files.INNER)
    assert config["rope_scaling"]["original_max_position_embeddings"] == 512
    assert max_context(config) == 2048
