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
        distinct = set(picks)
        before = sum(self.start <= pick < self.frame for pick in distinct)
        after = sum(self.frame <= pick < self.end for pick in distinct)
        return min(before, after) >= self.needs


def planted(clip: Clip) -> list[Event]:
    """Return a clip's events, grouped by kind, in order of time within each kind.

    The frames before an event reach back to the previous event of its kind, and the frames after it
    reach to the next. A colour change is visible if one frame before it and one after it are
    picked. A direction change needs two frames before and two after, because one frame shows no
    direction. A collision needs one frame in the second before and one in the second after, because
    at other times the shapes are too far apart to suggest a collision.
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
    """Return the first changed frame of each event of one kind, in ascending order.

    The clip is divided into ``clip.events`` parts of about equal length. Each part has one event,
    whose frame is drawn from the clip's seed.
    """
    if clip.events == 0:
        return []
    draw = random.Random(f"labkit events/{clip.seed}/{kind}/{clip.length}/{clip.events}")
    bounds = [2 + i * (clip.length - 3) // clip.events for i in range(clip.events + 1)]
    return [draw.randrange(low, max(low + 1, high - 1)) for low, high in pairwise(bounds)]


def shares(events: Sequence[Event], picks: Sequence[int]) -> dict[str, dict[str, int]]:
    """Count, by kind, the events (``planted``) and those that the picks show (``visible``)."""
    by_kind: dict[str, dict[str, int]] = {}
    for event in events:
        counts = by_kind.setdefault(event.kind, {"visible": 0, "planted": 0})
        counts["visible"] += event.visible(picks)
        counts["planted"] += 1
    return by_kind
