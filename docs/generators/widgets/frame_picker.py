"""Keyframes against exact frames: what a video loader picks, and what it decodes."""

from __future__ import annotations

from typing import Any

from docs.generators.widgets.page import Widget
from labkit.config import FramePicks
from labkit.workload.video.frame_selection import picks_exact_positions


def data() -> dict[str, Any]:
    """Return the article's clip and the pick methods, exact ones first."""
    return {
        "keyframes": 12,
        "gop": 10,
        "budget": 16,
        "exact": [how.value for how in FramePicks if picks_exact_positions(how)],
        "checked": FramePicks.seek.value,  # the article decodes from the keyframe before each pick
        "lossy": [how.value for how in FramePicks if not picks_exact_positions(how)],
    }


WIDGET = Widget(
    name="frame_picker",
    title="Keyframes against exact frames",
    source="After the widget of “Keyframe-Only Video Loading in vLLM: The Accuracy-Throughput "
    "Trade” (2026-06-10).",
    mirrored="<code>labkit/workload/video/frame_selection.py</code>",
    functions=("frame_picker",),
    data=data,
    text_page="video",
)
