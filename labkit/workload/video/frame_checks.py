"""Checks of a request's frames: a reference decode, and the picks by arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.config import Workload
from labkit.workload.video.clip_reader import (
    DecodeCounts,
    FrameIndex,
    Pixels,
    open_clip,
    pixels,
    refuse_damaged,
)
from labkit.workload.video.frame_decoding import DecodedFrames, check_counts
from labkit.workload.video.frame_selection import (
    Undecodable,
    distances,
    pick_frames,
    picks_exact_positions,
    positions,
    repeated,
)

MAX_LISTED_STRETCHES = 200  # ranges of keyframes in a record, for the picture of the picks
THREADS = 1  # with more threads a decoder does not flag damaged frames


def digest(frame: Pixels) -> str:
    """Return 12 hex digits of the SHA-256 of a frame's shape and pixels."""
    sha = hashlib.sha256(repr(frame.shape).encode())
    sha.update(frame.data)
    return sha.hexdigest()[:12]


def strided_ranges(places: Sequence[int]) -> list[list[int]]:
    """Return ascending indices as ranges with a constant step: [first, step, count]."""
    ranges: list[list[int]] = []
    for place in places:
        if ranges:
            first, step, count = ranges[-1]
            if count == 1 or place == first + step * count:
                ranges[-1] = [first, (place - first) if count == 1 else step, count + 1]
                continue
        ranges.append([place, 0, 1])
    return ranges


@dataclass(frozen=True)
class FrameDigests:
    """Picked indices, the decoder's counts, and digests of the frames of one request."""

    picks: tuple[int, ...]
    counts: DecodeCounts
    digests: Mapping[int, str]


def frame_digests(taken: DecodedFrames) -> FrameDigests:
    """Return the digests of a request's frames, so that their pixels can be released."""
    digests = {place: digest(frame) for place, frame in taken.frames.items()}
    return FrameDigests(taken.picks, taken.counts, digests)


@dataclass
class Reference:
    """A reference decode of one clip, independent of all arms.

    ``pixels``: digests of the frames decoded so far, by index.
    """

    path: Path
    pixels: dict[int, str] = field(default_factory=dict)

    @cached_property
    def frame_index(self) -> FrameIndex:
        """The clip's index of frames; raises :class:`Undecodable`."""
        with open_clip(self.path, THREADS) as clip:
            return clip.frame_index()

    def decode(self, places: Collection[int]) -> None:
        """Decode the clip from its beginning and keep the digests of ``places``.

        What breaks ends it; frames that it did not reach have no digest.
        """
        left = set(places) - self.pixels.keys()
        if not left:
            return
        try:
            with open_clip(self.path, THREADS) as clip:
                for place, frame in enumerate(clip.container.decode(clip.stream)):
                    refuse_damaged(frame)
                    if place in left:
                        self.pixels[place] = digest(pixels(frame))
                        left.discard(place)
                    if not left:
                        break
        except Undecodable:
            return

    def check(self, workload: Workload, wanted: int, taken: FrameDigests) -> dict[str, Any]:
        """Return a request's outputs as the record holds them: what was asked and what was taken.

        Raises
        ------
        Undecodable
            The arm did not go its way, or there is nothing to hold its frames against.
        """
        frame_index = self.frame_index
        asked = pick_frames(workload.picks, len(frame_index), frame_index.keyframes, wanted)
        if asked == list(taken.picks):  # else the gate says which frame was not asked for
            check_counts(workload, taken.picks, taken.counts, frame_index.keyframes)
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
            "wished": picks_exact_positions(workload.picks),
            "asked": asked,
            "picks": list(taken.picks),
            "pixels": [mine[place] for place in taken.picks],
            "decoder": [self.pixels[place] for place in taken.picks],
        }

    def facts(self, wanted: int, taken: FrameDigests) -> dict[str, Any]:
        """Return a request's counts, repeated picks and distances from the exact positions.

        Counts that a decoder does not report (OpenCV's packets) are None.
        """
        frame_index, picks = self.frame_index, taken.picks
        listed = strided_ranges(frame_index.keyframes)
        counts, told = vars(taken.counts), taken.counts.packets_read > 0
        far = distances(picks, positions(len(frame_index), wanted), frame_index.seconds)
        return {
            "frames": len(frame_index),
            "seconds": round(frame_index.seconds[-1], 6),
            "keyframes": len(frame_index.keyframes),
            "keyframe_places": listed if len(listed) <= MAX_LISTED_STRETCHES else None,
            **{name: n if told or name == "frames_decoded" else None for name, n in counts.items()},
            "repeated": repeated(picks),
            "distance_frames": far.mean_frames,
            "most_frames": far.max_frames,
            "distance_ms": round(far.mean_ms, 3),
            "most_ms": round(far.max_ms, 3),
        }
