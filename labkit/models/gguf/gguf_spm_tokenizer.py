"""Build the tokenizer of a SentencePiece vocabulary (``tokenizer.ggml.model`` = llama).

The vocabulary has a score per token instead of a list of merges. Of all neighbouring pairs that
form a token, the pair whose token has the highest score is merged first. The tokenizers library
needs a ranked list of merges, so every merge is ranked by the score of the token that it forms.
Characters without a token become the tokens of their bytes.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers

from labkit.machine.exception_text import one_line
from labkit.models.gguf.gguf_header import GGUFError, GGUFFile

SPACE = "\u2581"  # replaces every space of a text
UNKNOWN_TOKEN = 2  # a value of tokenizer.ggml.token_type


def build_spm(
    file: GGUFFile, tokens: list[str], vocab: dict[str, int], *, adds_space: bool
) -> Tokenizer:
    """Build the tokenizer without its added tokens.

    ``file``: the GGUF file. ``tokens``, ``vocab``: the tokens by id, and the ids by token.
    ``adds_space``: whether a space is put before a text. Raises ``GGUFError`` if the scores do not
    match the tokens.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise GGUFError(f"tokenizer.ggml.scores must have {len(tokens)} numbers")
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    unknown = [token for token, kind in zip(tokens, kinds, strict=False) if kind == UNKNOWN_TOKEN]
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
