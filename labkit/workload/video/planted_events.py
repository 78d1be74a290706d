"""Planted events of synthetic clips, and whether picked frames show these events.

Visibility in the frames is not a model's accuracy: no model is involved.
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
    """An event whose first changed frame is ``frame``.

    The event is visible if the picks include at least ``needs`` different frames of
    ``start ... frame - 1``, and at least ``needs`` of ``frame ... end - 1``.
    """

    kind: str
    frame: int
    start: int
    end: int
    needs: int = 1

    def visible(self, picks: Iterable[int]) -> bool:
        """Return whether the picked frames show the event."""
        distinct = set(picks)
        before = sum(self.start <= pick < self.frame for pick in distinct)
        after = sum(self.frame <= pick < self.end for pick in distinct)
        return min(before, after) >= self.needs


def planted(clip: Clip) -> list[Event]:
    """Return a clip's events, grouped by kind, in order of time within each kind.

    One frame shows a colour, so a colour change needs one frame on each side, between the previous
    and the next change. It takes two frames to show a direction, so a direction change needs two on
    each side. A collision needs one frame on each side within a second, because earlier and later
    the shapes are too far apart to suggest a collision.
    """
    events: list[Event] = []
    for kind in KINDS:
        frames = event_frames(clip, kind)
        for before, frame, after in zip(
            [0, *frames], frames, [*frames[1:], clip.length], strict=False
        ):
            if kind == "collision":
                start, end = max(before, frame - clip.fps), min(after, frame + clip.fps)
            else:
                start, end = before, after
            events.append(Event(kind, frame, start, end, 2 if kind == "direction change" else 1))
    return events


def event_frames(clip: Clip, kind: str) -> list[int]:
    """Draw the frames of a clip's events of one kind: one in each of ``clip.events`` parts."""
    if clip.events == 0:
        return []
    draw = random.Random(f"labkit events/{clip.seed}/{kind}/{clip.length}/{clip.events}")
    bounds = [2 + i * (clip.length - 3) // clip.events for i in range(clip.events + 1)]
    return [draw.randrange(low, max(low + 1, high - 1)) for low, high in pairwise(bounds)]


def shares(events: Sequence[Event], picks: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return the number of planted events, and the number that the picks show, by kind."""
    by_kind: dict[str, dict[str, int]] = {}
    for event in events:
        counts = by_kind.setdefault(event.kind, {"visible": 0, "planted": 0})
        counts["visible"] += event.visible(picks)
        counts["planted"] += 1
    return by_kind
