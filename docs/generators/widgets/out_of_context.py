"""Frames quoted out of context: the events that the picked frames of a clip show, by budget."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from docs.generators.widgets.page import Widget
from labkit.config import Clip, FramePicks
from labkit.workload.video.clip_synthesis import COLOURS, event_frames, planted, shape_size
from labkit.workload.video.frame_selection import picks_exact_positions

CONF = Path(__file__).parents[3] / "conf" / "workload" / "video_lengths.yaml"
FIRST = "5 s, one keyframe"  # the article's case
QUESTIONS = {
    "colour change": "Does the disc of the first lane change its colour?",
    "direction change": "Does the square turn round?",
    "collision": "Do the two discs of the third lane collide?",
}


def clip_data(clip: Clip) -> dict[str, Any]:
    """Return what the page's functions need of a clip."""
    return {
        "name": clip.name,
        "length": clip.length,
        "fps": clip.fps,
        "width": clip.width,
        "height": clip.height,
        "size": shape_size(clip),
        "keyframes": list(range(0, clip.length, clip.gop or clip.length)),
        "events": [asdict(event) for event in planted(clip)],
        "frames": {kind: event_frames(clip, kind) for kind in QUESTIONS},
    }


def data() -> dict[str, Any]:
    """Return the clips of ``experiment=keyframes`` with 16 frames, and the pick methods."""
    clips = [Clip(**one) for one in OmegaConf.load(CONF)["made"]]
    clips = sorted((c for c in clips if c.frames is None), key=lambda c: c.name != FIRST)
    return {
        "clips": {clip.name: clip_data(clip) for clip in clips},
        "questions": QUESTIONS,
        "colours": ["#{:02x}{:02x}{:02x}".format(*colour) for colour in COLOURS],
        "lossy": [how.value for how in FramePicks if not picks_exact_positions(how)],
    }


WIDGET = Widget(
    name="out_of_context",
    title="Frames quoted out of context",
    source="After the widget of “Keyframe-Only Video Loading in vLLM: The Accuracy-Throughput "
    "Trade” (2026-06-10), with the planted events of labkit's clips.",
    mirrored="<code>labkit/workload/video/clip_synthesis.py</code>",
    functions=("frame_picker", "out_of_context"),
    data=data,
    text_page="articles/video",
)
