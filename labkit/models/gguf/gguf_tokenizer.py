"""Convert a GGUF file's vocabulary to ``tokenizer.json`` and ``tokenizer_config.json``.

``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE; ``tokenizer.ggml.pre`` names its
pre-tokenizer) or ``llama`` (SentencePiece). The names are those of llama.cpp
(``src/llama-vocab.cpp``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from labkit.machine.exception_text import one_line
from labkit.models.gguf.gguf_header import (
    CONTROL_TOKEN,
    NORMAL_TOKEN,
    UNKNOWN_TOKEN,
    USER_DEFINED_TOKEN,
    GGUFError,
    GGUFFile,
)
from labkit.models.gguf.gguf_pre_tokenizers import PreTokenizer, find_pre_tokenizer

# In a file with one of these words in its name, special tokens swallow the white space after them,
# except some.
PHI3_NAMES, KEPT_SPACES = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
SPACE = "\u2581"  # replaces every space of a text

MAX_TOKENS = 1 << 20
# Of a token of SentencePiece and of all, which are split at every character. By default it trains
# tokens of 16 characters at most, and the largest vocabulary, Gemma's, has 262,144 tokens.
MAX_TOKEN_CHARACTERS, MAX_CHARACTERS = 1 << 10, 1 << 23
# Keys of the ids that end a text, a turn and a message.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Tokens that end a text or a turn in whatever file they are and of whatever type, as in llama.cpp.
END_TOKENS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[e~["),
        *("<EOT>", "_<EOT>", "[EOT]", "<|eom_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
    )
)
# Keys of the ids of tokens of fill-in-the-middle that end a text, too: padding, a repository's name
# and a file's. Without the key, the token is the one with one of these texts.
FIM_END_TOKENS = {
    "tokenizer.ggml.fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "tokenizer.ggml.fim_rep_token_id": (
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    "tokenizer.ggml.fim_sep_token_id": ("<|file_sep|>",),
}
# With a token of each set, a turn has several messages, each of which ends with "<|end|>".
MULTIPLE_MESSAGES = ({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"})

BYTE_LEVEL_BPE, SENTENCE_PIECE = "gpt2", "llama"  # values of tokenizer.ggml.model


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file from its metadata.

    Raises ``GGUFError`` if the tokenizer is not supported, or its lists do not match each other.
    """
    is_spm = _kind(file) == SENTENCE_PIECE
    tokens = file.strings("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(tokens) > MAX_TOKENS or len(vocab) != len(tokens):
        raise GGUFError(
            f"the vocabulary of {len(tokens)} tokens has duplicates or more than {MAX_TOKENS}"
        )
    built = _build_spm(file, tokens, vocab) if is_spm else _build_bpe(file, vocab)
    _add_added_tokens(built, file, tokens)
    _add_special_tokens_processor(built, file, tokens)
    return built


def _kind(file: GGUFFile) -> str:
    """Return ``tokenizer.ggml.model``, and refuse kinds that are not supported."""
    kind = file.string("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL_BPE, SENTENCE_PIECE):
        raise GGUFError(
            f"tokenizer {kind!r} is not supported; must be {BYTE_LEVEL_BPE} (byte-level BPE) or "
            f"{SENTENCE_PIECE} (SentencePiece)"
        )
    return kind


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    return find_pre_tokenizer(file.string("tokenizer.ggml.pre", "default"))


def _build_bpe(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = _pre_tokenizer(file)
    try:
        built = Tokenizer(
            models.BPE(vocab=vocab, merges=_merges(file), ignore_merges=pre.ignores_merges)
        )
    except Exception as error:  # the library raises bare Exception
        raise GGUFError(f"the merges do not match the tokens ({one_line(error)})") from None
    built.pre_tokenizer = pre.build()
    if pre.normalizes:
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    return built


def tokenizer_config(file: GGUFFile, context: int) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens, chat template, ``context`` in tokens."""
    tokens = file.strings("tokenizer.ggml.tokens")
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
    """Return the content of generation_config.json: the BOS token, and all that end a request."""
    key = "tokenizer.ggml.bos_token_id"
    bos = {"bos_token_id": _token_id(file, key)} if key in file.metadata else {}
    eos_ids = _end_token_ids(file)
    return {**bos, **({"eos_token_id": sorted(eos_ids)} if eos_ids else {})}


def _end_token_ids(file: GGUFFile) -> set[int]:
    """Return the ids that the file names as ends, and those of the tokens that are ends by text."""
    tokens = file.strings("tokenizer.ggml.tokens")
    named = {_token_id(file, key) for key in (*END_KEYS, *FIM_END_TOKENS) if key in file.metadata}
    ends = {tokens[index]: index for index in named | _ends_by_text(file)}
    if all(ends.keys() & some for some in MULTIPLE_MESSAGES):
        ends.pop("<|end|>", None)
    if "<|tool_response>" in ends:  # Gemma 4, in which "</s>" is a word
        ends.pop("</s>", None)
    return set(ends.values())


def _ends_by_text(file: GGUFFile) -> set[int]:
    texts = set(END_TOKENS)
    for key, fim_texts in FIM_END_TOKENS.items():
        texts.update(fim_texts if key not in file.metadata else ())
    tokens = file.strings("tokenizer.ggml.tokens")
    return {index for index, token in enumerate(tokens) if token in texts}


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    """Return the merges as pairs, split at the space, which no token of byte-level BPE contains."""
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise GGUFError(f"{merge!r} is not a merge of two tokens")
        merges.append((left, right))
    return merges


def _add_added_tokens(built: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Add the tokens that are matched whole. As in llama.cpp, an end by its text is always one."""
    kinds, model = _token_types(file), file.metadata.get("general.name")
    strips = isinstance(model, str) and any(name in model.lower() for name in PHI3_NAMES)
    ends = _end_token_ids(file) & _ends_by_text(file)
    for index, (kind, token) in enumerate(zip(kinds, tokens, strict=True)):
        added = AddedToken(token, normalized=False, rstrip=strips and token not in KEPT_SPACES)
        if kind == CONTROL_TOKEN or index in ends:
            added.special = True
            built.add_special_tokens([added])
        elif kind == USER_DEFINED_TOKEN:
            built.add_tokens([added])


def _token_types(file: GGUFFile) -> list[int]:
    """Return the type of each token, a normal one if the file does not have the types."""
    number = len(file.strings("tokenizer.ggml.tokens"))
    kinds = file.metadata.get("tokenizer.ggml.token_type", np.empty(0, np.int32))
    is_integers = isinstance(kinds, np.ndarray) and kinds.dtype.kind in "iu"
    if is_integers and not len(kinds):
        return [NORMAL_TOKEN] * number
    if not is_integers or len(kinds) != number:
        raise GGUFError(
            f"tokenizer.ggml.token_type must be a list of {number} integers, one for each token"
        )
    return [int(kind) for kind in kinds]


def _add_special_tokens_processor(built: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Make the tokenizer add the BOS and EOS tokens that llama.cpp would add to a text.

    If the file has no ``add_bos_token``, the default is llama.cpp's for the file's pre-tokenizer or
    for SentencePiece.
    """
    default_bos = _kind(file) == SENTENCE_PIECE or _pre_tokenizer(file).adds_bos
    adds_bos = _flag(file, "tokenizer.ggml.add_bos_token", default=default_bos)
    adds_eos = _flag(file, "tokenizer.ggml.add_eos_token", default=False)
    bos = [_token_id(file, "tokenizer.ggml.bos_token_id")] if adds_bos else []
    eos = [_token_id(file, "tokenizer.ggml.eos_token_id")] if adds_eos else []
    if bos or eos:
        built.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in bos), "$A", *(tokens[i] for i in eos)],
            special_tokens=[(tokens[i], i) for i in dict.fromkeys([*bos, *eos])],
        )


def _flag(file: GGUFFile, key: str, *, default: bool) -> bool:
    value = file.metadata.get(key, default)
    if not isinstance(value, bool):
        raise GGUFError(f"{key} is {value!r}; it must be true or false")
    return value


def _token_id(file: GGUFFile, key: str) -> int:
    index, number = file.count(key), len(file.strings("tokenizer.ggml.tokens"))
    if index >= number:
        raise GGUFError(f"{key} is {index}, but the vocabulary has only {number} tokens")
    return index


def _build_spm(file: GGUFFile, tokens: list[str], vocab: dict[str, int]) -> Tokenizer:
    """Build the tokenizer of a SentencePiece vocabulary, without its added tokens.

    The vocabulary has a score per token instead of a list of merges: of all neighbouring pairs that
    form a token, the one whose token has the highest score is merged first. The tokenizers library
    needs a ranked list, so every merge is ranked by the score of the token that it forms.
    Characters without a token become the tokens of their bytes.

    Raises ``GGUFError`` if the scores or the types do not match the tokens, a token has more than
    ``MAX_TOKEN_CHARACTERS``, or all have more than ``MAX_CHARACTERS``.
    """
    adds_space = _flag(file, "tokenizer.ggml.add_space_prefix", default=True)
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise GGUFError(f"tokenizer.ggml.scores must have {len(tokens)} numbers")
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise GGUFError(
            f"a token of SentencePiece has {longest} characters; the limit is "
            f"{MAX_TOKEN_CHARACTERS}"
        )
    total = sum(map(len, tokens))
    if total > MAX_CHARACTERS:
        raise GGUFError(
            f"the tokens of SentencePiece have {total} characters in all; the limit is "
            f"{MAX_CHARACTERS}"
        )
    kinds = _token_types(file)
    unknown = [token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN_TOKEN]
    try:
        built = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=_ranked_merges(tokens, vocab, scores.tolist()),
                unk_token=unknown[0] if unknown else None,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise GGUFError(f"the vocabulary is invalid ({one_line(error)})") from None
    replace = normalizers.Replace(" ", SPACE)
    built.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if adds_space else replace
    )
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if adds_space else parts)
    return built


def _ranked_merges(
    tokens: list[str], vocab: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that together form a token, the highest-scoring token first."""
    ranked = []
    for index, token in enumerate(tokens):
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
