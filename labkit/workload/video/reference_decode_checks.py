"""Checks of a request: its picks against the pick method, its pixels against a reference."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
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
)

MAX_LISTED_STRETCHES = 200  # with more ranges of keyframes, a record does not list them
THREADS = 1  # with several threads a decoder does not flag damaged frames


def digest(frame: Pixels) -> str:
    """Return 12 hex digits of the SHA-256 of a frame's shape and pixels."""
    sha = hashlib.sha256(repr(frame.shape).encode())
    sha.update(frame.data)
    return sha.hexdigest()[:12]


def strided_ranges(places: Sequence[int]) -> list[list[int]]:
    """Compress ascending indices into ranges with a constant step: [first, step, count]."""
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
    """A request's picked indices, its decoder's counts, and its frames' digests by index."""

    picks: tuple[int, ...]
    counts: DecodeCounts
    digests: Mapping[int, str]


def frame_digests(decoded: DecodedFrames) -> FrameDigests:
    """Return the digests of a request's frames, so that their pixels can be released."""
    digests = {place: digest(frame) for place, frame in decoded.frames.items()}
    return FrameDigests(decoded.picks, decoded.counts, digests)


@dataclass
class Reference:
    """A clip's reference decode, which is independent of all arms.

    ``pixels``: the digests of the reference frames decoded so far, by index.
    """

    path: Path
    pixels: dict[int, str] = field(default_factory=dict)

    @cached_property
    def frame_index(self) -> FrameIndex:
        """The clip's index of frames. Raises :class:`Undecodable` if the clip is broken."""
        with open_clip(self.path, THREADS) as clip:
            return clip.frame_index()

    def decode(self, places: Collection[int]) -> None:
        """Decode the clip from its beginning and store the digests of the frames ``places``.

        A defect in the clip ends the decode without an exception; later frames get no digest.
        """
        left = set(places) - self.pixels.keys()
        if not left:
            return
        with suppress(Undecodable), open_clip(self.path, THREADS) as clip:
            for place, frame in enumerate(clip.container.decode(clip.stream)):
                refuse_damaged(frame)
                if place in left:
                    self.pixels[place] = digest(pixels(frame))
                    left.discard(place)
                if not left:
                    break

    def outputs(
        self, workload: Workload, num_frames: int, arm_frames: FrameDigests
    ) -> dict[str, Any]:
        """Return a request's outputs for the record.

        The outputs are the expected and the actual picks, and the digests of the arm's and of the
        reference's frames. Raises ``Undecodable`` if the reference decode lacks a picked frame.
        """
        requested = self._requested(workload, num_frames)
        self.decode(set(arm_frames.picks))
        unknown = [place for place in arm_frames.picks if place not in self.pixels]
        if unknown:
            raise Undecodable(
                f"frame {unknown[0]} cannot be checked, because decoding from the beginning "
                "did not return it"
            )
        picks = arm_frames.picks
        digests = [arm_frames.digests[place] for place in picks]
        together = repr(list(zip(picks, digests, strict=True)))
        return {
            "kind": "frames",
            "digest": hashlib.sha256(together.encode()).hexdigest(),
            "wished": picks_exact_positions(workload.picks),
            "asked": requested,
            "picks": list(picks),
            "pixels": digests,
            "decoder": [self.pixels[place] for place in picks],
        }

    def _requested(self, workload: Workload, num_frames: int) -> list[int]:
        index = self.frame_index
        return pick_frames(workload.picks, len(index), index.keyframes, num_frames)

    def check_counts(
        self, workload: Workload, num_frames: int, picks: Sequence[int], counts: DecodeCounts
    ) -> None:
        """Check that a request's decoder counts match the arm's pick method.

        Wrong picks are not checked: the correctness gate reports them. Raises ``Undecodable`` if
        the counts do not match.
        """
        if self._requested(workload, num_frames) == list(picks):
            check_counts(workload, picks, counts, self.frame_index.run_starts)

    def facts(self, num_frames: int, arm_frames: FrameDigests) -> dict[str, Any]:
        """Return the record's notes on a clip and a request, as JSON types.

        They are the clip's length and keyframes, the decoder's counts, the repeated picks, and the
        picks' distances from the exact positions. Counts that a decoder does not report (OpenCV's
        packets) are None.
        """
        frame_index, picks = self.frame_index, arm_frames.picks
        listed = strided_ranges(frame_index.keyframes)
        counts_known = arm_frames.counts.packets_read > 0
        counts = {
            name: count if counts_known or name == "frames_decoded" else None
            for name, count in vars(arm_frames.counts).items()
        }
        return {
            "frames": len(frame_index),
            "seconds": round(frame_index.seconds[-1], 6),
            "keyframes": len(frame_index.keyframes),
            "keyframe_places": listed if len(listed) <= MAX_LISTED_STRETCHES else None,
            **counts,
            "repeated": len(picks) - len(set(picks)),
            **distances(picks, positions(len(frame_index), num_frames), frame_index.seconds),
        }
