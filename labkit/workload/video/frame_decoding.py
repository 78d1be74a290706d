"""Decode the frames of one request, by the configured pick method and decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.config import Decoder, FramePicks, Workload, count_text
from labkit.machine.exception_text import one_line
from labkit.workload.video.clip_reader import (
    MAX_BUFFERED_FRAMES,
    DecodeCounts,
    FrameIndex,
    OpenClip,
    Pixels,
    open_clip,
    pixels,
)
from labkit.workload.video.frame_selection import (
    Undecodable,
    decode_runs,
    decoder_runs,
    pick_frames,
    picks_exact_positions,
    positions,
)

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


@dataclass(frozen=True)
class DecodedFrames:
    """The frames of one request.

    ``picks``: the source index of each picked frame, in order, with repetitions. ``frames``: pixels
    by source index. ``counts``: the decoder's counts; OpenCV reports frames but no packets.
    """

    picks: tuple[int, ...]
    frames: Mapping[int, Pixels]
    counts: DecodeCounts


def decode_frames(path: Path, workload: Workload, num_frames: int) -> DecodedFrames:
    """Open a clip, pick ``num_frames`` of its frames and decode these frames.

    Raises ``Undecodable`` if the clip cannot be decoded. The message does not name the clip.
    """
    if workload.decoder is Decoder.opencv:
        return _opencv(path, num_frames, workload.decoder_threads)
    return decode_picks(path, workload.picks, num_frames, workload.decoder_threads)


def decode_picks(path: Path, how: FramePicks, num_frames: int, threads: int) -> DecodedFrames:
    """Pick and decode frames with PyAV; see :func:`decode_frames`."""
    with open_clip(path, threads) as clip:
        if how is FramePicks.stream and (count := clip.header_frames()) > 0:
            return _stream(clip, count, num_frames)
        return decode_indexed(clip, clip.frame_index(), how, num_frames)


def decode_indexed(
    clip: OpenClip, frame_index: FrameIndex, how: FramePicks, num_frames: int
) -> DecodedFrames:
    """Pick and decode frames of a clip whose packets' headers were read."""
    if how is FramePicks.stream:
        clip.container.seek(0, stream=clip.stream, any_frame=False)
        return _stream(clip, len(frame_index), num_frames)
    picks = pick_frames(how, len(frame_index), frame_index.keyframes, num_frames)
    way = _seek if picks_exact_positions(how) else _keyframes
    return DecodedFrames(tuple(picks), way(clip, frame_index, picks), clip.counts)


def _stream(clip: OpenClip, count: int, num_frames: int) -> DecodedFrames:
    picks = positions(count, num_frames)
    left, frames = set(picks), dict[int, Pixels]()
    for place, frame in enumerate(clip.decoded(clip.packets())):
        if place in left:
            frames[place] = pixels(frame)
            left.discard(place)
            if not left:
                break
    if left:
        raise Undecodable(
            f"frame {min(left)} of {count} was picked, but the decoder returned only "
            f"{count_text(clip.counts.frames_decoded, 'frame')}"
        )
    return DecodedFrames(tuple(picks), frames, clip.counts)


def _seek(clip: OpenClip, frame_index: FrameIndex, picks: Sequence[int]) -> dict[int, Pixels]:
    """Decode each pick from the keyframe at or before it, and return the pixels by index."""
    found: dict[int, Pixels] = {}
    for leg in decode_runs(picks, frame_index.run_starts):
        ahead = clip.decoded(clip.from_keyframe(frame_index, leg.start))
        for stop in leg.stops:
            found[stop] = pixels(_at(ahead, frame_index.times[stop], stop))
        clip.stream.codec_context.flush_buffers()
    return found


def _at(frames: Iterator[VideoFrame], time: int, place: int) -> VideoFrame:
    """Advance ``frames`` to the frame presented at ``time`` and return that frame."""
    for frame in frames:
        when = frame.dts if frame.pts is None else frame.pts
        if when is not None and when >= time:
            if when == time:
                return frame
            break
    raise Undecodable(f"the decoder did not return frame {place}")


def _keyframes(clip: OpenClip, frame_index: FrameIndex, picks: Sequence[int]) -> dict[int, Pixels]:
    found: dict[int, Pixels] = {}
    for place in dict.fromkeys(picks):
        frame = clip.alone(next(clip.from_keyframe(frame_index, place)))
        if not frame.key_frame:
            raise Undecodable(f"the packet of frame {place} is marked as a keyframe but is not one")
        found[place] = pixels(frame)
    return found


def _opencv(path: Path, num_frames: int, threads: int) -> DecodedFrames:
    """Decode with OpenCV, as the article behind ``ablation=keyframes`` does."""
    import cv2

    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, threads])
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
    try:
        if not capture.isOpened():
            raise Undecodable("OpenCV cannot open the clip")
        count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        picks = positions(count, num_frames)
        left, frames, counts = set(picks), dict[int, Pixels](), DecodeCounts()
        while left and capture.grab():
            place, counts.frames_decoded = counts.frames_decoded, counts.frames_decoded + 1
            if place in left:
                decoded, picture = capture.retrieve()
                if not decoded:
                    break
                frames[place] = np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB), np.uint8)
                left.discard(place)
        if left:
            raise Undecodable(
                f"frame {min(left)} of {count} was picked, but OpenCV returned only "
                f"{count_text(counts.frames_decoded, 'frame')}"
            )
        return DecodedFrames(tuple(picks), frames, counts)
    except cv2.error as error:
        raise Undecodable(f"OpenCV: {one_line(error)}") from error
    finally:
        capture.release()


def check_counts(
    workload: Workload, picks: Sequence[int], counts: DecodeCounts, keyframes: Sequence[int]
) -> None:
    """Check by the decoder's counts that a request used its arm's pick method.

    ``keyframes``: those at which a run may start, ``FrameIndex.run_starts``. Up to
    ``MAX_BUFFERED_FRAMES`` extra frames are allowed at the end of each run of the decoder. Raises
    ``Undecodable`` if the counts do not match the method.
    """
    exact = picks_exact_positions(workload.picks)
    runs = decoder_runs(workload.picks, picks, keyframes)
    least = sum(run.frames for run in runs)
    most = least + (MAX_BUFFERED_FRAMES * len(runs) if exact else 0)
    seeks = 0 if workload.picks is FramePicks.stream else len(runs)
    matches = least <= counts.frames_decoded <= most and seeks <= counts.seeks <= 2 * seeks
    if not exact:
        matches = matches and counts.delta_frames == 0
    if not matches:
        raise Undecodable(
            f"the decoder returned {count_text(counts.frames_decoded, 'frame')} ("
            f"{counts.delta_frames} not keyframes) after {counts.seeks} seeks, which does not "
            f"match workload.picks={workload.picks.value}"
        )
