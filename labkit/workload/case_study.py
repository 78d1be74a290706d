"""One long prompt beside two short ones: 3,000, 500 and 10 tokens in, 64 out each.

Source: the case of "vllm-metal vs mlx_lm: Contiguous vs Paged Varlen KV Cache" (20 May
2026), three prompts of 30K, 5K and 10 tokens with 256 out, at about a tenth of its size.
"""

from __future__ import annotations

from labkit.workload.random_ids import RandomIds
from labkit.workload.requests import RequestKind

KIND = RequestKind(RandomIds("case_study", [(3000, 64), (500, 64), (10, 64)]))
