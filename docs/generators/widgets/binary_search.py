"""The binary search that finds a unit's request, step by step, for a batch of 2 to 16 requests."""

from __future__ import annotations

from typing import Any

from docs.generators.binary_search_steps import BATCH
from docs.generators.widgets.page import Widget
from labkit.kernel_constants import BQ

REQUESTS = range(2, 17)
PREFILLS = (40, 64, 17, 33, 24)


def batch(requests: int) -> tuple[int, ...]:
    """Return the query lengths of a mixed step: decodes of one token, then prefill chunks."""
    prefills = max(1, requests // 3)
    return (1,) * (requests - prefills) + PREFILLS[:prefills]


def data() -> dict[str, Any]:
    """Return the rows of a Q-block and a batch for each number of requests."""
    batches = {n: batch(n) for n in REQUESTS}
    return {"rows": BQ, "requests": len(BATCH), "batches": batches}


WIDGET = Widget(
    name="binary_search",
    title="How a threadgroup finds its request",
    source="After the widget of “One Launch for Any Batch: The Binary Search Inside vllm-metal’s "
    "Varlen Attention” (2026-06-12).",
    mirrored="<code>docs/generators/binary_search_steps.py</code>, whose search is that of the "
    "kernels' resolver <code>binary_search</code>",
    functions=("binary_search",),
    data=data,
    text_page="binary-search",
)
