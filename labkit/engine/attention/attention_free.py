"""The attention of a model that has no layers with keys and values."""

from __future__ import annotations

from typing import Any, Literal

from labkit.engine.attention.launch_report import Reports, merge_reports


class NoAttention:
    """An ``Attention`` that no layer calls."""

    arrays: Literal["any"] = "any"

    def bind(self, layer: int, **_options: Any) -> None:
        """Raise ``ValueError``, because there is no such layer."""
        raise ValueError(f"layer {layer}: the model has no layers with keys and values")

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        """Raise ``ValueError``, because there is no such layer."""
        raise ValueError(f"layer {layer}: the model has no layers with keys and values")

    def report(self, metadata: Any) -> Reports:
        """Return no reports."""
        return merge_reports([])

    def pending(self, metadata: Any) -> list[Any]:
        """Return no arrays."""
        return []
