"""How much of their prompts requests share: the hits that a prefix cache could have at best."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.workload.tokenized_prompts import Prompt


def shared_tokens(prompts: Sequence[Prompt], block_size: int, *, warm: bool = False) -> int:
    """Count the prompt tokens that a cache of unlimited memory would find.

    Parameters
    ----------
    prompts
        In the order of submission, each after the ones before it are computed.
    block_size
        Tokens that are found together; a prompt's last token is always computed.
    warm
        Whether all of them were served once before.

    Returns
    -------
    int
        Tokens in whole blocks with which an earlier prompt begins too. Answers are not counted
        as earlier tokens: which ones they are is only known afterwards.
    """
    seen: set[bytes] = set()
    if warm:
        seen.update(digest for prompt in prompts for digest in _beginnings(prompt, block_size))
    found = 0
    for prompt in prompts:
        beginnings = _beginnings(prompt, block_size)
        most = (len(prompt.token_ids) - 1) // block_size
        hits = next((i for i, digest in enumerate(beginnings) if digest not in seen), most)
        found += min(hits, most) * block_size
        seen.update(beginnings)
    return found


def _beginnings(prompt: Prompt, block_size: int) -> list[bytes]:
    """Return a digest of the first block, of the first two, and so on."""
    digest, found = hashlib.blake2b(digest_size=16), []
    ids = np.asarray(prompt.token_ids, "<u4")
    for end in range(block_size, len(ids) + 1, block_size):
        digest.update(ids[end - block_size : end].tobytes())
        found.append(digest.digest())
    return found


def sharing_notes(
    prompts: Sequence[Prompt], block_size: int, *, warm: bool, unshared: bool
) -> dict[str, Any]:
    """Return what a record says of shared beginnings; ``unshared``: it is the control."""
    return {
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "shared_tokens": shared_tokens(prompts, block_size, warm=warm),
        "block_size": block_size,
        "unshared": unshared,
    }
