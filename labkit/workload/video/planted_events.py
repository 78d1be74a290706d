"""Planted events, and whether picked frames show that they happened.

This is evidence in the pictures, never accuracy: no model has looked at them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from labkit.config import Clip

KINDS = ("colour change", "direction change", "collision")


@dataclass(frozen=True)
class Event:
    """Something that happens at ``frame``: the first frame of what is new.

    It is visible where ``needs`` different frames of ``start ... frame - 1`` and as many of
    ``frame ... end - 1`` were picked.
    """

    kind: str
    frame: int
    start: int
    end: int
    needs: int = 1

    def visible(self, picks: Iterable[int]) -> bool:
        """Tell whether the picked frames show it."""
        seen = set(picks)
        before = sum(self.start <= pick < self.frame for pick in seen)
        after = sum(self.frame <= pick < self.end for pick in seen)
        return min(before, after) >= self.needs


def planted(clip: Clip) -> list[Event]:
    """Return a clip's events, in order within each kind.

    A colour is seen on one frame, so that a change of colour needs one frame on each side, back
    to the change before and on to the next. A direction is seen on two frames, so that its
    change needs two on each side. A collision needs one frame on each side within a second of
    it: earlier and later the two shapes are far apart and anything may have happened.
    """
    found: list[Event] = []
    for kind in KINDS:
        frames = event_frames(clip, kind)
        for before, frame, after in zip(
            [0, *frames], frames, [*frames[1:], clip.length], strict=False
        ):
            if kind == "collision":
                start, end = max(before, frame - clip.fps), min(after, frame + clip.fps)
            else:
                start, end = before, after
            found.append(Event(kind, frame, start, end, 2 if kind == "direction change" else 1))
    return found


def event_frames(clip: Clip, kind: str) -> list[int]:
    """Draw the frames of a clip's events of one kind: one in each equal part, none at its ends."""
    if clip.events == 0:
        return []
    draw = random.Random(f"labkit events/{clip.seed}/{kind}/{clip.length}/{clip.events}")
    bounds = [2 + i * (clip.length - 3) // clip.events for i in range(clip.events + 1)]
    return [draw.randrange(low, max(low + 1, high - 1)) for low, high in pairwise(bounds)]


def shares(events: Sequence[Event], picks: Sequence[int]) -> dict[str, dict[str, int]]:
    """Count by kind how many events there are and how many of them the picks show."""
    found: dict[str, dict[str, int]] = {}
    for event in events:
        counted = found.setdefault(event.kind, {"visible": 0, "planted": 0})
        counted["visible"] += event.visible(picks)
        counted["planted"] += 1
    return found
