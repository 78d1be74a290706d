"""A GGUF file's vocabulary as ``tokenizer.json`` and ``tokenizer_config.json``.

Only byte-level BPE (``tokenizer.ggml.model`` gpt2). How text is cut before it is merged is
named in the file by a word, ``tokenizer.ggml.pre``; the words are llama.cpp's
(``src/llama-vocab.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from labkit.models.gguf.gguf_header import GGUFError, GGUFFile

MAX_TOKENS = 1 << 20
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # of tokenizer.ggml.token_type: found whole in any text

# Words with up to so many digits; contractions in any case, punctuation takes line ends along.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a file.

    Raises
    ------
    BadFile
        It is of another kind, or its lists do not fit each other.
    """
    kind, pre = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise GGUFError(f"tokenizer {kind!r}; read is gpt2 (byte-level BPE)")
    tokens = file.texts("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(tokens) > MAX_TOKENS or len(vocab) != len(tokens):
        raise GGUFError(f"its vocabulary of {len(tokens)} tokens repeats some or is too large")
    try:
        built = Tokenizer(
            models.BPE(vocab=vocab, merges=_merges(file), ignore_merges=_ignores_merges(pre))
        )
    except Exception as error:  # the library raises bare Exception
        raise GGUFError(f"its merges do not fit its tokens ({_line(error)})") from None
    _set_pre_tokenizer(built, pre)
    built.decoder = decoders.ByteLevel()
    _add_added_tokens(built, file, tokens)
    _add_bos_processor(built, file, tokens)
    return built


def tokenizer_config(file: GGUFFile, context: int) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens by name and the chat template."""
    tokens = file.texts("tokenizer.ggml.tokens")
    ids = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    named = {
        name: tokens[_token_id(file, key)] for name, key in ids.items() if key in file.metadata
    }
    template = file.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        **({"chat_template": template} if isinstance(template, str) else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return generation_config.json: what begins a text and what ends it."""
    ends = [
        _token_id(file, key)
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if key in file.metadata
    ]
    key = "tokenizer.ggml.bos_token_id"
    begins = {"bos_token_id": _token_id(file, key)} if key in file.metadata else {}
    return {**begins, **({"eos_token_id": sorted(set(ends))} if ends else {})}


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    """Cut every merge at its space; in byte-level BPE a token itself has none."""
    merges = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise GGUFError(f"{merge!r} is no merge of two tokens")
        merges.append((left, right))
    return merges


def _ignores_merges(pre: str) -> bool:
    """Tell whether a word that is a token is taken as it is, whatever the merges say."""
    return pre == "llama-bpe"


def _set_pre_tokenizer(built: Tokenizer, pre: str) -> None:
    """Cut text as ``pre`` says: at digits, as GPT-2 does, or as WORDS does."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuttings: dict[str, Callable[[], list[Any]]] = {
        "gpt-2": lambda: [gpt2],
        "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "qwen2": lambda: _regex_split(""),
        "llama-bpe": lambda: _regex_split("{1,3}"),
    }
    if pre not in cuttings:
        raise GGUFError(f"pre-tokenizer {pre!r}; read are {', '.join(cuttings)}")
    built.pre_tokenizer = pre_tokenizers.Sequence(cuttings[pre]())
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()


def _regex_split(digits: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN % digits), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _add_added_tokens(built: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    if len(kinds) not in (0, len(tokens)):
        raise GGUFError(f"tokenizer.ggml.token_type has {len(kinds)} of {len(tokens)} tokens")
    for kind, token in zip(kinds, tokens, strict=bool(len(kinds))):
        if kind == CONTROL_TOKEN:
            built.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED_TOKEN:
            built.add_tokens([AddedToken(token, normalized=False)])


def _add_bos_processor(built: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Begin every text with the token that the file names, where it asks for that."""
    if file.metadata.get("tokenizer.ggml.add_bos_token") is not True:
        return
    bos = _token_id(file, "tokenizer.ggml.bos_token_id")
    built.post_processor = processors.TemplateProcessing(
        single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
    )


def _token_id(file: GGUFFile, key: str) -> int:
    index, number = file.count(key), len(file.texts("tokenizer.ggml.tokens"))
    if index >= number:
        raise GGUFError(f"{key} is {index}; there are {number} tokens")
    return index


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
