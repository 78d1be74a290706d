"""The KV memory of three requests in each layout: bytes held, used and wasted."""

from __future__ import annotations

from typing import Any

from docs.generators.widgets import model_shapes
from docs.generators.widgets.page import Widget
from labkit import config
from labkit.engine.memory_budget.budget_decision import BYTE_UNITS
from labkit.engine.memory_budget.required_kv_slots import CACHE_STEP_TOKENS

LENGTHS = (30_000, 5_000, 10)  # the article's three requests
MAX_LENGTH = 32_768


def data() -> dict[str, Any]:
    """Return the article's lengths, the growth step, and the bytes of a token by model."""
    return {
        "lengths": LENGTHS,
        "max_length": MAX_LENGTH,
        "step": CACHE_STEP_TOKENS,
        "growth_step": config.KV().growth_step,
        "token_bytes": model_shapes.kv_bytes_per_token(),
        "byte_units": BYTE_UNITS,
    }


WIDGET = Widget(
    name="kv_layouts",
    title="The same three requests in three KV layouts",
    source="After the widget of “vllm-metal vs mlx_lm: Contiguous vs Paged Varlen KV Cache” "
    "(2026-05-20).",
    mirrored="<code>slots_for</code> of "
    "<code>labkit/engine/memory_budget/required_kv_slots.py</code>",
    functions=("kv_layouts", "number_format"),
    data=data,
)
