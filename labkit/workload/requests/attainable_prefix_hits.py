"""Attainable prefix hits: the prompt tokens that an unlimited prefix cache would hit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.workload.tokenized_prompt import Prompt


def _shared_tokens(prompts: Sequence[Prompt], block_size: int, *, warm: bool = False) -> int:
    """Return the number of prompt tokens that a cache of unlimited memory would hit.

    They are in full blocks of ``block_size`` tokens that are also a prefix of an earlier prompt.
    Hits on generated tokens, which are unknown beforehand, are not counted, and a prompt's last
    token is always computed. The prompts are in the order of submission. Each is assumed to be
    computed before the next arrives. ``warm``: whether all were served once before.
    """
    cached: set[bytes] = set()
    if warm:
        cached.update(digest for prompt in prompts for digest in _prefixes(prompt, block_size))
    hit_tokens = 0
    for prompt in prompts:
        prefixes = _prefixes(prompt, block_size)
        max_blocks = (len(prompt.token_ids) - 1) // block_size
        hits = next((i for i, digest in enumerate(prefixes) if digest not in cached), max_blocks)
        hit_tokens += min(hits, max_blocks) * block_size
        cached.update(prefixes)
    return hit_tokens


def _prefixes(prompt: Prompt, block_size: int) -> list[bytes]:
    """Return the digests of the prompt's first block, of its first two blocks, and so on."""
    digest, prefixes = hashlib.blake2b(digest_size=16), []
    ids = np.asarray(prompt.token_ids, "<u4")
    for end in range(block_size, len(ids) + 1, block_size):
        digest.update(ids[end - block_size : end].tobytes())
        prefixes.append(digest.digest())
    return prefixes


def sharing_notes(
    prompts: Sequence[Prompt], block_size: int, *, warm: bool, unshared: bool
) -> dict[str, Any]:
    """Return the notes on shared prefixes for a record.

    ``unshared``: whether the prompts were changed so that no two share a prefix.
    """
    return {
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "shared_tokens": _shared_tokens(prompts, block_size, warm=warm),
        "block_size": block_size,
        "unshared": unshared,
    }
