"""The ways to a clip's frames, one request each: what was taken, and what the decoder counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.config import Decoder, Picks, Workload
from labkit.machine.exception_text import one_line
from labkit.workload.video.clip_reader import Counts, Opened, Pixels, Shown, opened, pixels
from labkit.workload.video.frame_selection import Undecodable, keeps_wishes, legs, picked, positions

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

IN_FLIGHT = 20  # frames that a decoder may hold: 16 of H.264's, and some of its own


@dataclass(frozen=True)
class Taken:
    """What a request gave.

    ``picks``: the true place of every frame, in order; ``frames``: pixels by place. ``counts``
    has the decoder's own numbers; of OpenCV it knows the frames and no packets.
    """

    picks: tuple[int, ...]
    frames: Mapping[int, Pixels]
    counts: Counts


def take(path: Path, workload: Workload, wanted: int) -> Taken:
    """Do one request: open a clip, pick ``wanted`` frames of it and decode them.

    Raises
    ------
    Undecodable
        One line without the clip's name.
    """
    if workload.decoder is Decoder.opencv:
        return _opencv(path, wanted, workload.decoder_threads)
    with opened(path, workload.decoder_threads) as clip:
        if workload.picks is Picks.stream:
            return _stream(clip, wanted)
        shown = clip.shown()
        picks = picked(workload.picks, len(shown), shown.keyframes, wanted)
        way = _seek if keeps_wishes(workload.picks) else _keyframes
        return Taken(tuple(picks), way(clip, shown, picks), clip.counts)


def _stream(clip: Opened, wanted: int) -> Taken:
    """Decode everything; the number of frames is the container's word, else a sweep's."""
    count = clip.stream.frames
    if count <= 0:
        count = len(clip.shown())
        clip.container.seek(0, stream=clip.stream, any_frame=False)
    picks = positions(count, wanted)
    left, frames = set(picks), dict[int, Pixels]()
    for place, frame in enumerate(clip.decoded(clip.packets())):
        if place in left:
            frames[place] = pixels(frame)
            left.discard(place)
            if not left:
                break
    if left:
        raise Undecodable(
            f"frame {min(left)} was picked of {count}, and the decoder gave "
            f"{clip.counts.frames_decoded} frames"
        )
    return Taken(tuple(picks), frames, clip.counts)


def _seek(clip: Opened, shown: Shown, picks: Sequence[int]) -> dict[int, Pixels]:
    """Decode from the keyframe before each pick up to it."""
    found: dict[int, Pixels] = {}
    for leg in legs(picks, shown.keyframes):
        ahead = clip.decoded(clip.from_keyframe(shown, leg.start))
        for stop in leg.stops:
            found[stop] = pixels(_at(ahead, shown.times[stop], stop))
        clip.stream.codec_context.flush_buffers()
    return found


def _at(frames: Iterator[VideoFrame], time: int, place: int) -> VideoFrame:
    """Return the frame that is shown at ``time``."""
    for frame in frames:
        when = frame.dts if frame.pts is None else frame.pts
        if when is not None and when >= time:
            if when == time:
                return frame
            break
    raise Undecodable(f"the decoder did not give frame {place}")


def _keyframes(clip: Opened, shown: Shown, picks: Sequence[int]) -> dict[int, Pixels]:
    """Decode the packets of the picked keyframes, each by itself."""
    found: dict[int, Pixels] = {}
    for place in dict.fromkeys(picks):
        frame = clip.alone(next(clip.from_keyframe(shown, place)))
        if not frame.key_frame:
            raise Undecodable(f"the packet of frame {place} is marked as a keyframe and is none")
        found[place] = pixels(frame)
    return found


def _opencv(path: Path, wanted: int, threads: int) -> Taken:
    """Grab everything and retrieve the picks, as the article's baseline does."""
    import cv2

    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, threads])
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
    try:
        if not capture.isOpened():
            raise Undecodable("OpenCV cannot open it")
        count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        picks = positions(count, wanted)
        left, frames, counts = set(picks), dict[int, Pixels](), Counts()
        while left and capture.grab():
            place, counts.frames_decoded = counts.frames_decoded, counts.frames_decoded + 1
            if place in left:
                given, picture = capture.retrieve()
                if not given:
                    break
                frames[place] = np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB), np.uint8)
                left.discard(place)
        if left:
            raise Undecodable(
                f"frame {min(left)} was picked of {count}, and OpenCV gave "
                f"{counts.frames_decoded} frames"
            )
        return Taken(tuple(picks), frames, counts)
    except cv2.error as error:
        raise Undecodable(f"OpenCV: {one_line(error)}") from error
    finally:
        capture.release()


def proven(
    workload: Workload, picks: Sequence[int], counts: Counts, keyframes: Sequence[int]
) -> None:
    """Check by the decoder's counts that a request went the way that its arm is named after.

    A decoder may hold some frames more than it was asked for, at the end of each way.

    Raises
    ------
    Undecodable
        It went another way.
    """
    last = max(picks)
    if workload.picks is Picks.stream:
        least, most, seeks = last + 1, last + 1 + IN_FLIGHT, 0
    elif workload.picks is Picks.seek:
        ways = legs(picks, keyframes)
        least = sum(leg.frames for leg in ways)
        most, seeks = least + IN_FLIGHT * len(ways), len(ways)
    else:
        least = most = seeks = len(set(picks))
    gone = least <= counts.frames_decoded <= most and seeks <= counts.seeks <= 2 * seeks
    if not keeps_wishes(workload.picks):
        gone = gone and counts.delta_frames == 0
    if not gone:
        raise Undecodable(
            f"the decoder gave {counts.frames_decoded} frames ({counts.delta_frames} of them no "
            f"keyframes) after {counts.seeks} seeks, which is not workload.picks="
            f"{workload.picks.value}"
        )
