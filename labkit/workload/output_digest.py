"""Digests of outputs, fine enough to locate the first difference of two arms, and their texts."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.models.tokenizer import Tokenizer

MAX_DISTINCT_IDS = 4096  # per run; reports show further ids as numbers
MAX_TEXT_LENGTH = 40  # characters of one token's text


def array_outputs(out: NDArray[Any], dtype: str = "float32") -> dict[str, Any]:
    """Return the digests of an attention output: [tokens, heads, head_dim], contiguous.

    ``dtype``: name of the element type, for the record. ``digest`` is the SHA-256 of the bytes in
    hex. ``rows`` and ``heads`` are base64 of little-endian uint32 CRC-32s, one per token row and
    one per head over all tokens.
    """
    by_head = np.ascontiguousarray(out.transpose(1, 0, 2))
    return {
        "kind": "array",
        "digest": hashlib.sha256(out.data).hexdigest(),
        "shape": list(out.shape),
        "dtype": dtype,
        "rows": _crc32s(out),
        "heads": _crc32s(by_head),
    }


def _crc32s(rows: NDArray[Any]) -> str:
    flat = rows.reshape(len(rows), -1)
    sums = np.fromiter((zlib.crc32(row.data) for row in flat), dtype="<u4", count=len(flat))
    return base64.b64encode(sums.tobytes()).decode("ascii")


def token_digest(requests: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return the SHA-256 over every request's id and token ids, in the order of ``requests``."""
    digest = hashlib.sha256()
    for request_id, tokens in requests:
        digest.update(f"{request_id}\n{len(tokens)}\n".encode())
        digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """Return the first 16 hex digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def token_texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> dict[str, str]:
    """Map the first ``MAX_DISTINCT_IDS`` distinct ids, as strings, to their texts.

    Ids without a text in the tokenizer (padding of the vocabulary) are omitted.
    """
    ids = list(dict.fromkeys(tokens))[:MAX_DISTINCT_IDS]
    spelled = ((token, tokenizer.piece(token)) for token in ids)
    return {str(token): text[:MAX_TEXT_LENGTH] for token, text in spelled if text}
