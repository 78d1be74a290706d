"""What a request's frames are held against: a decode of their own, and the picks by arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.config import Workload
from labkit.workload.video.clip_reader import Counts, Pixels, Shown, opened, pixels, whole
from labkit.workload.video.frame_decoding import Taken, proven
from labkit.workload.video.frame_selection import (
    Undecodable,
    distances,
    keeps_wishes,
    picked,
    positions,
    repeated,
)

MOST_LISTED = 200  # stretches of keyframes that a record lists, for the picture of the picks
THREADS = 1  # with more a decoder does not tell which frames are damaged


def digest(frame: Pixels) -> str:
    """Return what tells a frame from another: 12 hex digits over its size and its pixels."""
    found = hashlib.sha256(repr(frame.shape).encode())
    found.update(frame.data)
    return found.hexdigest()[:12]


def stretches(places: Sequence[int]) -> list[list[int]]:
    """Write ascending places as stretches of even steps: [first, step, how many]."""
    found: list[list[int]] = []
    for place in places:
        if found:
            first, step, count = found[-1]
            if count == 1 or place == first + step * count:
                found[-1] = [first, (place - first) if count == 1 else step, count + 1]
                continue
        found.append([place, 0, 1])
    return found


@dataclass(frozen=True)
class Given:
    """What is kept of a request: places, the decoder's counts, and digests of the frames."""

    picks: tuple[int, ...]
    counts: Counts
    digests: Mapping[int, str]


def given(taken: Taken) -> Given:
    """Return what is kept of a request; its pixels, which may be many, are not."""
    found = {place: digest(frame) for place, frame in taken.frames.items()}
    return Given(taken.picks, taken.counts, found)


@dataclass
class Reference:
    """One clip, read by nobody's arm: its frames as packets tell, and the decoder's pixels.

    ``pixels``: digests by place, of the frames that were asked for so far.
    """

    path: Path
    pixels: dict[int, str] = field(default_factory=dict)

    @cached_property
    def shown(self) -> Shown:
        """What its packets tell; raises :class:`Undecodable`."""
        with opened(self.path, THREADS) as clip:
            return clip.shown()

    def decode(self, places: Collection[int]) -> None:
        """Decode the clip from its beginning and keep the digests of ``places``.

        What breaks ends it; frames that it did not reach have no digest.
        """
        left = set(places) - self.pixels.keys()
        if not left:
            return
        try:
            with opened(self.path, THREADS) as clip:
                for place, frame in enumerate(clip.container.decode(clip.stream)):
                    whole(frame)
                    if place in left:
                        self.pixels[place] = digest(pixels(frame))
                        left.discard(place)
                    if not left:
                        break
        except Undecodable:
            return

    def check(self, workload: Workload, wanted: int, taken: Given) -> dict[str, Any]:
        """Return a request's outputs as the record holds them: what was asked and what was taken.

        Raises
        ------
        Undecodable
            The arm did not go its way, or there is nothing to hold its frames against.
        """
        shown = self.shown
        asked = picked(workload.picks, len(shown), shown.keyframes, wanted)
        if asked == list(taken.picks):  # else the gate says which frame was not asked for
            proven(workload, taken.picks, taken.counts, shown.keyframes)
        self.decode(set(taken.picks))
        unknown = [place for place in taken.picks if place not in self.pixels]
        if unknown:
            raise Undecodable(
                f"frame {unknown[0]} cannot be checked: decoding from the beginning did not give it"
            )
        mine = taken.digests
        return {
            "kind": "frames",
            "digest": hashlib.sha256(
                repr([(place, mine[place]) for place in taken.picks]).encode()
            ).hexdigest(),
            "wished": keeps_wishes(workload.picks),
            "asked": asked,
            "picks": list(taken.picks),
            "pixels": [mine[place] for place in taken.picks],
            "decoder": [self.pixels[place] for place in taken.picks],
        }

    def facts(self, wanted: int, taken: Given) -> dict[str, Any]:
        """Return what a request did to the clip: counts, repeated picks, distances from wishes.

        Counts that a decoder does not tell (OpenCV's packets) are None.
        """
        shown, picks = self.shown, taken.picks
        listed = stretches(shown.keyframes)
        counts, told = vars(taken.counts), taken.counts.packets_read > 0
        far = distances(picks, positions(len(shown), wanted), shown.seconds)
        return {
            "frames": len(shown),
            "seconds": round(shown.seconds[-1], 6),
            "keyframes": len(shown.keyframes),
            "keyframe_places": listed if len(listed) <= MOST_LISTED else None,
            **{name: n if told or name == "frames_decoded" else None for name, n in counts.items()},
            "repeated": repeated(picks),
            "distance_frames": far.mean_frames,
            "most_frames": far.most_frames,
            "distance_ms": round(far.mean_ms, 3),
            "most_ms": round(far.most_ms, 3),
        }
