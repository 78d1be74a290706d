"""The arithmetic of padding: what a rectangle holds that no sequence needs."""

from __future__ import annotations

from collections.abc import Iterable


def padding_waste(lengths: Iterable[int]) -> float:
    """Return the share of a batch's rectangle that is padding, 0 to 1.

    Sequences of these lengths are padded to the longest. The case study of "vllm-metal vs
    mlx_lm: Contiguous vs Paged Varlen KV Cache" (20 May 2026) has 30,000 + 5,000 + 10
    tokens: 35,010 of 90,000, so 61 % is wasted.
    """
    tokens = list(lengths)
    rectangle = len(tokens) * max(tokens, default=0)
    return 1 - sum(tokens) / rectangle if rectangle else 0.0
