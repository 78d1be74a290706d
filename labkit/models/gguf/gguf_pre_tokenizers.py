"""The pre-tokenizers that ``tokenizer.ggml.pre`` names, for byte-level BPE.

A pre-tokenizer splits a text before tokens are merged. Names and patterns are those of llama.cpp
(``src/llama-vocab.cpp``). The first pattern of a pre-tokenizer splits the text into its matches and
the text between them. Each further pattern splits the resulting pieces in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from labkit.models.gguf.gguf_header import GGUFError

# GPT-2's own pattern. Contractions match in lower case.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DIGIT = r"\p{N}"
THREE_DIGITS = r"[0-9][0-9][0-9]"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
# The letters that have upper and lower case in DeepSeek's pattern: those of Unicode 12, without
# Georgian and mathematical letters.
CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10d0}-\x{10ff}\x{1d400}-\x{1d7ff}\x{a7ba}-\x{a7ff}\x{2c2f}\x{2c5f}"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1df00}-\x{1df2a}\x{ab66}-\x{ab68}]]"
)
# A word has capitals (``_HEAD``), then small letters (``_TAIL``). Letters without case are in both.
_HEAD, _TAIL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Return the pattern of Llama 3 and Qwen 2, with the quantifier of a piece of digits."""
    return (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|{PUNCTUATION}|{WHITESPACE}"
    )


def _cased_words(digits: str, contractions: str) -> str:
    """Return the pattern of GPT-4o and Tekken: a capital after small letters starts a new word.

    ``digits`` is as in ``_words``. ``contractions`` is a pattern, such as ``CONTRACTIONS``, of what
    may follow a word.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_HEAD}*{_TAIL}+{contractions}|{start}{_HEAD}+{_TAIL}*{contractions}|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer.

    ``patterns``: regular expressions. ``adds_bos``: llama.cpp's default for ``add_bos_token``.
    ``ignores_merges``: whether a word that is a token of its own is encoded without merges.
    ``normalizes``: whether the original tokenizer converts texts to Unicode's NFC, which llama.cpp
    does not do.
    """

    patterns: tuple[str, ...]
    adds_bos: bool = False
    ignores_merges: bool = False
    normalizes: bool = False

    def build(self) -> Any:
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((DIGIT, GPT2))
_LLAMA3 = PreTokenizer((_words("{1,3}"),), adds_bos=True, ignores_merges=True)
_DBRX = PreTokenizer((_words("{1,3}"),))
_QWEN2 = PreTokenizer((_words(""),), normalizes=True)
_STABLELM2 = PreTokenizer((_words(""),))
_GPT4O = PreTokenizer((_cased_words("{1,3}", CONTRACTIONS + "?"),))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        CJK,
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{WHITESPACE}",
    )
)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", THREE_DIGITS)),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), _GPT2
    ),
    **dict.fromkeys(
        (
            *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
            "mellum2",
        ),
        _DIGITS,
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    "glm4": PreTokenizer(_DBRX.patterns, ignores_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    "qwen35": PreTokenizer(
        (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{WHITESPACE}",
        ),
        normalizes=True,
    ),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _STABLELM2),
    "tekken": PreTokenizer((_cased_words("", ""),), adds_bos=True, ignores_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{CASED}+",
            r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
            r"\s+$",
            r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
            DIGIT,
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer with this name. Raises ``GGUFError`` if there is none."""
    if name not in PRE_TOKENIZERS:
        raise GGUFError(
            f"pre-tokenizer {name!r} is not supported; must be one of: {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]
