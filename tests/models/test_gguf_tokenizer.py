import gguf_files
import pytest

from labkit.config import Model
from labkit.models import resolve, tokenizer
from labkit.models.gguf import GGUFError, gguf_header, gguf_tokenizer


def built(tmp_path, **changes):
    path = gguf_files.model(tmp_path / "m.gguf", **changes)
    return gguf_tokenizer.build_tokenizer(gguf_header.read_header(path))


def ids(tokenizer, text):
    return tokenizer.encode(text).ids


def names(tokenizer, text):
    return [tokenizer.id_to_token(token) for token in ids(tokenizer, text)]


def test_merges_are_applied_and_every_text_round_trips(tmp_path):
    bpe = built(tmp_path)
    assert names(bpe, "in the") == ["in", "Ġthe"]
    for text in ("in the end", "größer 漢字 १२ \n\n \t x", ""):
        assert bpe.decode(ids(bpe, text), skip_special_tokens=False) == text


def test_the_smollm_pre_tokenizer_splits_digits(tmp_path):
    assert names(built(tmp_path), "12") == ["1", "2"]
    assert names(built(tmp_path, tokenizer__ggml__pre="gpt-2"), "12") == ["12"]
    assert names(built(tmp_path, tokenizer__ggml__pre="qwen2"), "12") == ["1", "2"]
    assert names(built(tmp_path, tokenizer__ggml__pre="llama-bpe"), "12") == ["<|start|>", "12"]


def test_control_and_user_defined_tokens_are_matched_whole(tmp_path):
    bpe = built(tmp_path)
    assert names(bpe, "<|start|>in<|stop|><tool>") == [
        "<|start|>",
        "in",
        "<|stop|>",
        "<tool>",
    ]
    assert bpe.decode(ids(bpe, "<|start|>in<tool>"), skip_special_tokens=True) == "in<tool>"


def test_the_bos_token_is_prepended(tmp_path, no_cache):
    path = gguf_files.model(tmp_path / "m.gguf", tokenizer__ggml__add_bos_token=True)
    reader = tokenizer.load(resolve(Model(name="local", path=str(path))).path)
    assert reader.encode("in")[0] == reader.token_id("<|start|>") == 1
    chat = reader.encode_chat([{"role": "user", "content": "in"}])
    assert chat.count(1) == 2  # the template's own, of the question and of the answer


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"pre": "llama-bpe"}, ([1], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        *(({"pre": pre}, ([], [])) for pre in ("gpt-2", "smollm", "qwen2")),
        ({"pre": "qwen2", "add_bos_token": True}, ([1], [])),
        ({"add_eos_token": True}, ([], [2])),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token_id": 1}, ([1], [1])),
    ],
)
def test_a_text_has_the_special_tokens_that_llama_cpp_adds(tmp_path, changes, added):
    """A key that is absent has llama.cpp's default for its pre-tokenizer (llama-vocab.cpp)."""
    bpe = built(tmp_path, **{f"tokenizer__ggml__{key}": value for key, value in changes.items()})
    (before, after), plain = added, bpe.encode("in", add_special_tokens=False).ids
    assert ids(bpe, "in") == [*before, *plain, *after]


def test_end_tokens(tmp_path):
    path = gguf_files.model(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=0)
    generation = gguf_tokenizer.generation_config(gguf_header.read_header(path))
    assert generation == {"bos_token_id": 1, "eos_token_id": [0, 2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama' is not supported; must be gpt2"),
        (
            {"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__bos_token_id": None},
            "tokenizer.ggml.bos_token_id is missing",
        ),
        (
            {"tokenizer__ggml__add_bos_token": 1},
            "tokenizer.ggml.add_bos_token is 1; it must be true or false",
        ),
        (
            {"tokenizer__ggml__pre": "tekken"},
            "pre-tokenizer 'tekken' is not supported; must be one of: gpt-2",
        ),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "has duplicates"),
        ({"tokenizer__ggml__merges": ["ab"]}, "'ab' is not a merge of two tokens"),
        ({"tokenizer__ggml__merges": ["q uux"]}, "merges do not match the tokens"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__token_type": gguf_files.vocabulary()[2][:9]}, "has 9 entries for"),
    ],
)
def test_an_invalid_vocabulary_is_one_line(tmp_path, changes, message):
    with pytest.raises(GGUFError, match=message) as error:
        built(tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_an_unknown_special_token_id_is_refused(tmp_path):
    file = gguf_header.read_header(
        gguf_files.model(tmp_path / "m.gguf", tokenizer__ggml__eos_token_id=9999)
    )
    with pytest.raises(GGUFError, match=r"eos_token_id is 9999, but the vocabulary has"):
        gguf_tokenizer.tokenizer_config(file, 512)
