import gguf_files
import numpy as np
import pytest

from labkit.models import tokenizer
from labkit.models.gguf import GGUFError, gguf_header, gguf_tokenizer
from labkit.models.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer


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
    reader = tokenizer.load(gguf_files.local(path).path)
    assert reader.encode("in")[0] == reader.token_id("<|start|>") == 1
    chat = reader.encode_chat([{"role": "user", "content": "in"}])
    assert chat.count(1) == 2  # the template's own, of the question and of the answer


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        *(({"pre": pre}, ([1], [])) for pre in ("llama-bpe", "llama-v3", "tekken")),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
        *(({"pre": pre}, ([], [])) for pre in ("default", "gpt-2", "smollm", "qwen2", "gpt-4o")),
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


@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        ("a b c d e", {"eot": 0}, [0, 2]),
        ("a b c d e", {"eos": 4, "eom": 3}, [3, 4]),
        ("<|end|> <|im_end|> </s> <|eot_id|> <end_of_turn>", {}, [0, 1, 2, 3, 4]),  # of any type
        ("a b c <\uff5cend\u2581of\u2581sentence\uff5c> [e~[", {}, [2, 3, 4]),
        # Fill-in-the-middle: padding, a repository, a file; not the prefix.
        ("a b c <|fim_pad|> <|fim_prefix|>", {}, [2, 3]),
        ("<|repo_name|> b c <|file_sep|> <reponame>", {}, [0, 2, 3, 4]),
        ("a b c [PAD] <PAD>", {"fim_pad": 0, "fim_rep": 1}, [0, 1, 2]),
        ("a b c <|file_sep|> e", {"fim_sep": 4}, [2, 4]),
        ("<|end|> <|return|> x <|call|> e", {}, [1, 2, 3]),  # gpt-oss: messages end with <|end|>
        ("<|end|> <|return|> x <|calls|> e", {}, [1, 2, 3]),
        ("<|end|> <|flush|> x <|calls|> e", {}, [1, 2, 3]),
        ("<|end|> <|call|> x <|calls|> e", {}, [0, 1, 2, 3]),
        ("<|end|> <|return|> x <|call|> e", {"eot": 0}, [1, 2, 3]),
        ("</s> <|tool_response> x d e", {}, [1, 2]),
    ],
)
def test_end_tokens_are_those_of_llama_cpp(tmp_path, names, keys, ends):
    changes = {f"tokenizer__ggml__{key}_token_id": value for key, value in keys.items()}
    tokens = [*names.split(), *gguf_files.vocabulary()[0][5:]]
    path = gguf_files.model(tmp_path / "m.gguf", tokenizer__ggml__tokens=tokens, **changes)
    generation = gguf_tokenizer.generation_config(gguf_header.read_header(path))
    assert generation == {"bos_token_id": 1, "eos_token_id": ends}


def test_an_end_is_matched_whole_whatever_its_type(tmp_path):
    tokens = gguf_files.vocabulary()[0]
    tokens[-1] = "<|im_end|>"  # as some fine-tunes have it: an ordinary word
    bpe = built(tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=["Ġ t"])
    assert names(bpe, "a<|im_end|>") == ["a", "<|im_end|>"]
    assert bpe.decode(ids(bpe, "a<|im_end|>")) == "a"
    for types in (None, np.empty(0, np.int32)):
        untyped = built(tmp_path, tokenizer__ggml__token_type=types)
        assert names(untyped, "a<|end|>") == ["a", "<|end|>"]
        assert untyped.decode(ids(untyped, "a<|end|>")) == "a"
    word = built(tmp_path, tokenizer__ggml__eot_token_id=4)  # a letter that a file names as an end
    assert word.decode([4], skip_special_tokens=True) == tokens[4]


@pytest.mark.parametrize(("name", "stripped"), [("Phi 3", False), ("my Phi-3 mini", True)])
def test_special_tokens_of_phi_3_swallow_the_white_space_after_them(tmp_path, name, stripped):
    """As in llama.cpp, which knows the model by its name, except for some of them."""
    tokens = gguf_files.vocabulary()[0]
    tokens[1] = "<|endoftext|>"
    bpe = built(tmp_path, general__name=name, tokenizer__ggml__tokens=tokens)
    space = [] if stripped else ["Ġ", "Ċ"]
    assert names(bpe, "<|end|> \na") == ["<|end|>", *space, "a"]
    assert names(bpe, "<tool> \na") == ["<tool>", *space, "a"]
    assert names(bpe, "<|endoftext|> \na") == ["<|endoftext|>", "Ġ", "Ċ", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__model": "bert"}, "tokenizer 'bert' is not supported; must be gpt2"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.scores must have"),
        (
            {"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__bos_token_id": None},
            "tokenizer.ggml.bos_token_id is missing",
        ),
        (
            {"tokenizer__ggml__add_bos_token": 1},
            "tokenizer.ggml.add_bos_token is 1; it must be true or false",
        ),
        (
            {"tokenizer__ggml__pre": "viking"},
            "pre-tokenizer 'viking' is not supported; must be one of: default, gpt-2",
        ),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "has duplicates"),
        ({"tokenizer__ggml__merges": ["ab"]}, "'ab' is not a merge of two tokens"),
        ({"tokenizer__ggml__merges": ["q uux"]}, "merges do not match the tokens"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        (
            {"tokenizer__ggml__token_type": gguf_files.vocabulary()[2][:9]},
            "token_type must be a",
        ),
        (
            {"tokenizer__ggml__token_type": np.full_like(gguf_files.vocabulary()[2], np.nan, "f4")},
            "token_type must be a list of .* integers",
        ),
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


# One text in which the pre-tokenizers differ, and its pieces by llama.cpp's patterns.
TEXT = "It's HelloWorld 12345 $5.\n\n  a/b don'T \u4e2d\u6587"
PIECES = {
    "gpt-2": "It|'s| HelloWorld| 12345| $|5|.|\n\n | a|/|b| don|'|T| \u4e2d\u6587",
    "smollm": "It|'s| HelloWorld| |1|2|3|4|5| $|5|.|\n\n | a|/|b| don|'|T| \u4e2d\u6587",
    "default": "It|'|s| HelloWorld| |123|45| |$|5|.|\n\n | a|/|b| don|'|T| \u4e2d\u6587",
    "llama-v3": "It|'s| HelloWorld| |123|45| $|5|.\n\n| | a|/b| don|'T| \u4e2d\u6587",
    "qwen2": "It|'s| HelloWorld| |1|2|3|4|5| $|5|.\n\n| | a|/b| don|'T| \u4e2d\u6587",
    "gpt-4o": "It's| Hello|World| |123|45| $|5|.\n\n| | a|/b| don'T| \u4e2d\u6587",
    "tekken": "It|'s| Hello|World| |1|2|3|4|5| $|5|.\n\n| | a|/b| don|'T| \u4e2d\u6587",
}


def pieces(name, text):
    splits = find_pre_tokenizer(name).build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in splits]


@pytest.mark.parametrize("name", PIECES)
def test_a_pre_tokenizer_splits_as_llama_cpp_does(name):
    assert pieces(name, TEXT) == PIECES[name].split("|")


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_pre_tokenizer_loses_text(name):
    text = TEXT + "\r\n\t \u00e9\u0301 \U0001f999 \u0660\u0661"
    assert "".join(pieces(name, text)) == text


SPM_TOKENS = {
    "<unk>": (2, 0.0),
    "<s>": (3, 0.0),
    "</s>": (3, 0.0),
    **{f"<0x{byte:02X}>": (6, 0.0) for byte in range(256)},
    "\u2581": (1, -1.0),
    "a": (1, -2.0),
    "b": (1, -3.0),
    "c": (1, -4.0),
    "bc": (1, -5.0),
    "ab": (1, -6.0),
    "\u2581a": (1, -7.0),
}


def spm(tmp_path, **changes):
    keys = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__tokens": [*SPM_TOKENS],
        "tokenizer__ggml__token_type": np.array([kind for kind, _ in SPM_TOKENS.values()], "<i4"),
        "tokenizer__ggml__scores": np.array([score for _, score in SPM_TOKENS.values()], "<f4"),
    }
    return built(tmp_path, **keys | changes)


def test_sentence_piece_merges_the_pair_with_the_highest_score(tmp_path):
    assert names(spm(tmp_path), "abc") == ["<s>", "\u2581a", "bc"]
    bare = spm(tmp_path, tokenizer__ggml__add_space_prefix=False)
    assert names(bare, "abc") == ["<s>", "a", "bc"]
    # Both pairs "ab" score higher than the one that a space and "a" make.
    assert names(bare, "ab ab") == ["<s>", "ab", "\u2581", "ab"]


def test_sentence_piece_falls_back_to_bytes_and_round_trips(tmp_path):
    for adds_space in (True, False):
        tokenizer = spm(tmp_path, tokenizer__ggml__add_space_prefix=adds_space)
        assert "<0xC3>" in names(tokenizer, "\u00fc")
        for text in ("abc a", "\u00fc \U0001f999\n"):
            assert tokenizer.decode(ids(tokenizer, text)) == text


def test_sentence_piece_refuses_types_that_are_no_list(tmp_path):
    with pytest.raises(GGUFError, match=r"token_type must be a list of .* integers"):
        spm(tmp_path, tokenizer__ggml__token_type=3)


def test_sentence_piece_splits_no_token_of_thousands_of_characters(tmp_path, monkeypatch):
    """Such tokens would be split as often as they have characters, each time into two copies."""
    monkeypatch.setattr(gguf_tokenizer, "MAX_TOKEN_CHARACTERS", 6)  # those of a byte
    assert names(spm(tmp_path), "abc") == ["<s>", "\u2581a", "bc"]
    monkeypatch.setattr(gguf_tokenizer, "MAX_TOKEN_CHARACTERS", 5)
    monkeypatch.setattr(gguf_tokenizer, "_ranked_merges", lambda *_: pytest.fail("it is split"))
    with pytest.raises(GGUFError, match="SentencePiece has 6 characters; the limit is 5"):
        spm(tmp_path)


def test_sentence_piece_does_not_split_millions_of_characters(tmp_path, monkeypatch):
    total = sum(map(len, SPM_TOKENS))
    monkeypatch.setattr(gguf_tokenizer, "MAX_CHARACTERS", total)
    assert names(spm(tmp_path), "abc") == ["<s>", "\u2581a", "bc"]
    monkeypatch.setattr(gguf_tokenizer, "MAX_CHARACTERS", total - 1)
    with pytest.raises(GGUFError, match=f"have {total} characters in all; the limit is"):
        spm(tmp_path)
