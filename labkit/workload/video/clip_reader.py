"""Clips opened with PyAV: packets, the index of frames, and the pixels of a frame.

Every defect of a file is raised as :class:`Undecodable` with a message of one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from labkit.workload.video.frame_selection import Undecodable

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_Entry = tuple[int, bool, int]  # presentation time, whether it is a keyframe, decoding time
Pixels = NDArray[np.uint8]  # [height, width, 3], in RGB order
MAX_PIXELS = 1 << 26  # of one frame (8192 x 8192); a damaged header may claim any size
MAX_PACKETS = 10_000_000
# Frames that a decoder may have buffered: H.264's 16, and a few of the implementation's own.
MAX_BUFFERED_FRAMES = 20


@dataclass
class DecodeCounts:
    """Packets and frames of one request, counted at the demuxer's and the decoder's output.

    ``delta_frames``: decoded frames that are not keyframes.
    """

    packets_read: int = 0
    packets_decoded: int = 0
    frames_decoded: int = 0
    delta_frames: int = 0
    seeks: int = 0


@dataclass(frozen=True)
class FrameIndex:
    """A clip's frames in presentation order, read from its packets without decoding.

    A frame that an edit list hides has no place in the clip: the decoder does not return it. A
    keyframe may be hidden, though frames after it are not.
    """

    times: tuple[int, ...]  # presentation times, ascending, in units of ``unit`` seconds
    keyframes: tuple[int, ...]  # the indices of the keyframes, ascending
    # The decoding time of each keyframe's packet, by the keyframe's index; the presentation time if
    # the file has no decoding times.
    decode_times: dict[int, int]
    unit: float  # the stream's time base in seconds
    # The last hidden keyframe before frame 0: its index (-1 if it is the frame right before), and
    # its presentation time.
    hidden_keyframe: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.times)

    @property
    def run_starts(self) -> tuple[int, ...]:
        """The indices of the keyframes at which a run of the decoder may start, ascending."""
        hidden = self.hidden_keyframe
        return self.keyframes if hidden is None else (hidden[0], *self.keyframes)

    def time_of(self, place: int) -> int:
        """Return the presentation time of the frame at ``place``, possibly the hidden keyframe."""
        hidden = self.hidden_keyframe
        return hidden[1] if hidden is not None and place == hidden[0] else self.times[place]

    @property
    def seconds(self) -> list[float]:
        return [(time - self.times[0]) * self.unit for time in self.times]


@dataclass
class OpenClip:
    """A clip opened for one request. ``counts`` counts that request's packets and frames."""

    container: InputContainer
    stream: VideoStream
    counts: DecodeCounts = field(default_factory=DecodeCounts)

    def packets(self) -> Iterator[Packet[VideoStream]]:
        """Yield the packets from the current position to the end, except empty packets."""
        for packet in self.container.demux(self.stream):
            if packet.size == 0:
                continue
            self.counts.packets_read += 1
            if self.counts.packets_read > MAX_PACKETS:
                raise Undecodable(f"the clip has more than {MAX_PACKETS:,} packets")
            yield packet

    def decoded(self, packets: Iterator[Packet[VideoStream]]) -> Iterator[VideoFrame]:
        """Decode packets, flush the decoder, and yield the frames in presentation order."""
        context = self.stream.codec_context
        for packet in packets:
            self.counts.packets_decoded += 1
            yield from self._counted(context.decode(packet))
        yield from self._counted(context.decode(None))

    def alone(self, packet: Packet[VideoStream]) -> VideoFrame:
        context = self.stream.codec_context
        self.counts.packets_decoded += 1
        frames = self._counted([*context.decode(packet), *context.decode(None)])
        context.flush_buffers()
        if len(frames) != 1:
            raise Undecodable(
                f"the decoder returned {len(frames)} frames for the keyframe at {packet.pts}, not 1"
            )
        return frames[0]

    def _counted(self, frames: list[VideoFrame]) -> list[VideoFrame]:
        self.counts.frames_decoded += len(frames)
        self.counts.delta_frames += sum(not frame.key_frame for frame in frames)
        for frame in frames:
            refuse_damaged(frame)
        return frames

    @property
    def _is_mp4(self) -> bool:
        return "mp4" in self.container.format.name.split(",")

    def header_frames(self) -> int:
        """Return the header's number of frames; 0 if there is none or an edit list hides frames.

        An MP4 file that was trimmed without re-encoding has such a list, and its header still
        counts all frames. Those before and after the cut that the decoder needs are marked in the
        demuxer's index, the others are missing there.
        """
        count, entries = self.stream.frames, self.stream.index_entries
        if not self._is_mp4:
            return count
        ends = (*entries[:MAX_BUFFERED_FRAMES], *entries[-MAX_BUFFERED_FRAMES:])
        return 0 if len(entries) != count or any(entry.is_discard for entry in ends) else count

    def frame_index(self) -> FrameIndex:
        """Read all packets' headers and return the index of frames."""
        entries: list[_Entry] = []
        hidden: list[_Entry] = []
        for packet in self.packets():
            time = packet.dts if packet.pts is None else packet.pts
            if time is None:
                raise Undecodable(f"packet {len(entries) + len(hidden)} has no timestamp")
            when = time if packet.dts is None else packet.dts
            (hidden if packet.is_discard else entries).append((time, packet.is_keyframe, when))
        if not entries:
            raise Undecodable("the clip has no frames")
        promised = len(self.stream.index_entries) if self._is_mp4 else self.stream.frames
        count = self.counts.packets_read
        if count < promised:
            raise Undecodable(
                f"the clip ends after {count} of the {promised} frames that its header promises"
            )
        entries.sort()
        times = tuple(time for time, _, _ in entries)
        if len(set(times)) != len(times):
            raise Undecodable("two frames of the clip have the same timestamp")
        if any(times[0] <= time <= times[-1] for time, _, _ in hidden):
            raise Undecodable("an edit list hides frames between others; re-encode the clip")
        keys = {index: when for index, (_, is_key, when) in enumerate(entries) if is_key}
        unit = float(self.stream.time_base or 0)
        before = sorted(entry for entry in hidden if entry[0] < times[0])
        for place, (time, is_key, when) in enumerate(reversed(before), 1):
            if is_key:
                return FrameIndex(times, tuple(keys), {**keys, -place: when}, unit, (-place, time))
        return FrameIndex(times, tuple(keys), keys, unit)

    def from_keyframe(self, frame_index: FrameIndex, place: int) -> Iterator[Packet[VideoStream]]:
        """Seek to the keyframe with index ``place`` and yield its packet and all later packets.

        Some formats seek by presentation time, others by decoding time. If the first seek lands
        after the keyframe, a second seek lands at or before it.
        """
        target_time = frame_index.time_of(place)
        for offset in (target_time, min(target_time, frame_index.decode_times[place])):
            self.container.seek(offset, stream=self.stream)
            self.counts.seeks += 1
            packets = self.packets()
            for packet in packets:
                time = packet.dts if packet.pts is None else packet.pts
                if time == target_time:
                    return chain([packet], packets)
                if packet.dts is not None and packet.dts > frame_index.decode_times[place]:
                    break
        raise Undecodable(f"the keyframe at frame {place} cannot be found by seeking")


@contextmanager
def open_clip(path: Path | BinaryIO, threads: int) -> Iterator[OpenClip]:
    """Open a clip, a file or its content, for the duration of the context.

    Exceptions of PyAV inside the context are raised as :class:`Undecodable`. Error concealment is
    off, because the decoder would invent lost parts, differently in each arm. Raises
    ``Undecodable`` if the file is missing, broken or not a video.
    """
    import av

    try:
        with av.open(str(path) if isinstance(path, Path) else path, mode="r") as container:
            if not container.streams.video:
                raise Undecodable("the clip has no video stream")
            stream = container.streams.video[0]
            context = stream.codec_context
            if context is None:
                raise Undecodable("PyAV has no decoder for the clip's format")
            context.options = {"max_pixels": str(MAX_PIXELS), "err_detect": "explode"}
            context.thread_count = threads
            context.thread_type = "SLICE" if threads == 1 else "AUTO"
            yield OpenClip(container, stream)
    except (av.error.FFmpegError, OSError) as error:
        raise Undecodable(_reason(error)) from error
    except (ValueError, OverflowError, UnicodeDecodeError, EOFError) as error:
        raise Undecodable(f"the clip cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the message of a library's exception as one line, without the path if possible."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def refuse_damaged(frame: VideoFrame) -> None:
    """Raise ``Undecodable`` if the decoder flags the frame as damaged."""
    if frame.is_corrupt:
        raise Undecodable(f"the frame with timestamp {frame.pts} is damaged")


def pixels(frame: VideoFrame) -> Pixels:
    """Return a frame's RGB pixels; raise :class:`Undecodable` if it exceeds ``MAX_PIXELS``."""
    if frame.width * frame.height > MAX_PIXELS:
        raise Undecodable(
            f"a frame has {frame.width} x {frame.height} pixels; at most {MAX_PIXELS:,} are "
            "supported"
        )
    image: Any = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(image, np.uint8)
