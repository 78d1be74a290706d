"""The first difference of two outputs, as a phrase for readers.

For an array the phrase gives the token, the head and the distance in ULPs. The distance needs both
arms' values. These are stored only for the first block, and only if the arms differ. For requests
the phrase gives the request, the position, both tokens with their text, and the reference's logit
margin there.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.number_format import significant_text
from labkit.config import count_text
from labkit.records import StudyPath, read_output_values

Outputs = Mapping[str, Any]
MAX_SHOWN_CHARACTERS = 12  # of each text, starting at the first difference


def stored_values(cell_dir: StudyPath, outputs: Outputs) -> NDArray[np.float32] | None:
    """Return an output's values, float32 [tokens, heads, head_dim]; None if lost or altered."""
    content = read_output_values(cell_dir, outputs["digest"])
    if content is None:
        return None
    try:
        stored = np.load(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    digest = hashlib.sha256(np.ascontiguousarray(stored).tobytes()).hexdigest()
    return stored if digest == outputs["digest"] else None


def checksums(text: str) -> NDArray[np.uint32]:
    """Decode base64 text into CRC-32 checksums, one per token row or head."""
    return np.frombuffer(base64.b64decode(text), dtype="<u4").astype(np.uint32)


def ulp_distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the elementwise distance of two arrays in ULPs: 0 if equal, 1 for neighbours.

    The bits of a float32, read as sign and magnitude, have the same order as the numbers. The
    distance of +0 and -0 is 0.
    """
    return np.asarray(np.abs(_ordered(a) - _ordered(b)))


def _ordered(x: NDArray[np.float32]) -> NDArray[np.int64]:
    bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.asarray(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))


def array_difference(a: Outputs, b: Outputs, cell_dir: StudyPath) -> str:
    """Return a phrase on two arrays' difference: where it begins, its ULPs and its extent."""
    if a["shape"] != b["shape"] or a["dtype"] != b["dtype"]:
        return f"{a['dtype']} {a['shape']} and {b['dtype']} {b['shape']}"
    rows = np.flatnonzero(checksums(a["rows"]) != checksums(b["rows"]))
    heads = np.flatnonzero(checksums(a["heads"]) != checksums(b["heads"]))
    if not len(rows) or not len(heads):
        return "the bytes differ, but the checksums of all rows or of all heads agree"
    extent = f"{len(rows)} of {a['shape'][0]} token rows, {len(heads)} of {a['shape'][1]} heads"
    mine, theirs = stored_values(cell_dir, a), stored_values(cell_dir, b)
    if mine is None or theirs is None:
        where = f"first at token {rows[0]}, head {heads[0]}"
        return f"{where} ({extent}); ULP distance unknown: the values were not kept"
    return f"{_distance(mine, theirs)} ({extent})"


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> str:
    differ = a.view(np.uint32) != b.view(np.uint32)
    ulps = ulp_distance(a, b)
    token, head, _ = np.argwhere(differ)[0]
    first_ulps = int(ulps[token, head].max())
    largest_at = np.unravel_index(int(ulps.argmax()), ulps.shape)
    largest_ulps = int(ulps[largest_at])
    text = f"first at token {token}, head {head}: {first_ulps:,} ULP apart"
    if largest_ulps > first_ulps:
        text += f", at most {largest_ulps:,} ULP at token {largest_at[0]}, head {largest_at[1]}"
    return f"{text} [{a[largest_at]:.9g} against {b[largest_at]:.9g}]"


def token_difference(a: Outputs, b: Outputs) -> str:
    """Return a phrase on the first differing request: position, both tokens, logit margin."""
    others = {r["id"]: r for r in b["requests"]}
    same = {name: other["tokens"] for name, other in others.items()}
    differing = [r for r in a["requests"] if r["tokens"] != same.get(r["id"])]
    if not differing:
        return "the digests differ, but the tokens of all requests agree"
    first = differing[0]
    count = f"({len(differing)} of {count_text(len(a['requests']), 'request')})"
    if first["id"] not in others:
        return f"request {first['id']} is missing {count}"
    mine, theirs = first["tokens"], others[first["id"]]["tokens"]
    at = first_difference(mine, theirs)
    tokens = f"{_token(a, mine, at)} against {_token(b, theirs, at)}"
    margins = (first.get("margins") or ())[at : at + 1]
    margin = "".join(f", logit margin {significant_text(one, 3)}" for one in margins)
    return f"first in request {first['id']} at position {at}: {tokens}{margin} {count}"


def text_difference(a: Outputs, b: Outputs) -> str | None:
    """Return a phrase on the first request whose text differs, or None if all texts agree.

    Used for servers that return no token ids. Special tokens, surrounding space and U+FFFD are not
    compared (:mod:`labkit.models.tokenizer`).
    """
    differing = [name for name, share in text_shares(a, b).items() if share < 1]
    if not differing:
        return None
    count = f"({len(differing)} of {count_text(len(a['requests']), 'request')}, compared as text)"
    first, mine, theirs = differing[0], _texts(a), _texts(b)
    if first not in theirs:
        return f"request {first} is missing {count}"
    at = first_difference(mine[first], theirs[first])
    excerpt, other = (
        json.dumps(text[at : at + MAX_SHOWN_CHARACTERS], ensure_ascii=False)
        for text in (mine[first], theirs[first])
    )
    return f"first in request {first} at character {at}: {excerpt} against {other} {count}"


def text_shares(a: Outputs, b: Outputs) -> dict[str, float]:
    """Return, by request in ``a``, the share of its text before the first difference, 0 to 1."""
    digests = {r["id"]: r.get("text_digest") for r in b["requests"]}
    mine, theirs, shares = _texts(a), _texts(b), {}
    for request in a["requests"]:
        name = request["id"]
        if request.get("text_digest") is not None and request["text_digest"] == digests.get(name):
            shares[name] = 1.0
            continue
        x, y = mine[name], theirs.get(name, "")
        at = first_difference(x, y)
        shares[name] = min(at / max(len(x), len(y), 1), 0.999)  # below 1: the digests differ
    return shares


def _texts(outputs: Outputs) -> dict[str, str]:
    """Return each request's text, joined from its tokens' text if only ids were recorded."""
    pieces = outputs.get("pieces") or {}
    return {
        r["id"]: r["text"]
        if "text" in r
        else "".join(pieces.get(str(token), "\ufffd") for token in r["tokens"]).strip()
        for r in outputs["requests"]
    }


def _token(outputs: Outputs, tokens: Sequence[int], at: int) -> str:
    """Return the id of token ``at``, with its text if recorded; ``the end`` if there is none."""
    if at >= len(tokens):
        return "the end"
    piece = (outputs.get("pieces") or {}).get(str(tokens[at]))
    text = "" if piece is None else f" {json.dumps(piece, ensure_ascii=False)}"
    return f"{tokens[at]}{text}"


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the first position at which two sequences differ; the shorter length if none does."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
