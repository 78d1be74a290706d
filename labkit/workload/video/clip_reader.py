"""A clip opened with PyAV: its packets, what they tell of its frames, and one frame's pixels.

Everything that a file can do wrong ends as :class:`Undecodable` with one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.workload.video.frame_selection import Undecodable

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

Pixels = NDArray[np.uint8]  # [height, width, 3], red green blue
MOST_PIXELS = 1 << 26  # of a picture (8192 x 8192); a damaged header may ask for anything
MOST_PACKETS = 10_000_000


@dataclass
class Counts:
    """What a request asked of the demuxer and the decoder, counted where they answer."""

    packets_read: int = 0
    packets_decoded: int = 0
    frames_decoded: int = 0
    delta_frames: int = 0
    seeks: int = 0


@dataclass(frozen=True)
class Shown:
    """A clip's frames in the order in which they are shown, as its packets tell; none is decoded.

    Parameters
    ----------
    times
        When each frame is shown, in units of ``unit`` seconds, ascending.
    keyframes
        The places of the keyframes, ascending.
    decode_times
        When a keyframe's packet is decoded, by its place; where a file does not say, when it is
        shown.
    """

    times: tuple[int, ...]
    keyframes: tuple[int, ...]
    decode_times: dict[int, int]
    unit: float

    def __len__(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> list[float]:
        """When each frame is shown, from the first one."""
        return [(time - self.times[0]) * self.unit for time in self.times]


@dataclass
class Opened:
    """An open clip; ``counts`` is its request's."""

    container: InputContainer
    stream: VideoStream
    counts: Counts = field(default_factory=Counts)

    def packets(self) -> Iterator[Packet[VideoStream]]:
        """Yield the packets from here to the end, those that hold no frame to show left out."""
        for packet in self.container.demux(self.stream):
            if packet.size == 0:
                continue
            self.counts.packets_read += 1
            if self.counts.packets_read > MOST_PACKETS:
                raise Undecodable(f"it has more than {MOST_PACKETS:,} packets")
            yield packet

    def decoded(self, packets: Iterator[Packet[VideoStream]]) -> Iterator[VideoFrame]:
        """Decode packets, and what the decoder holds when they end; yield frames as shown."""
        context = self.stream.codec_context
        for packet in packets:
            self.counts.packets_decoded += 1
            yield from self._counted(context.decode(packet))
        yield from self._counted(context.decode(None))

    def alone(self, packet: Packet[VideoStream]) -> VideoFrame:
        """Decode one packet and nothing else; return its frame."""
        context = self.stream.codec_context
        self.counts.packets_decoded += 1
        frames = self._counted([*context.decode(packet), *context.decode(None)])
        context.flush_buffers()
        if len(frames) != 1:
            raise Undecodable(f"the keyframe at {packet.pts} gave {len(frames)} frames")
        return frames[0]

    def _counted(self, frames: list[VideoFrame]) -> list[VideoFrame]:
        self.counts.frames_decoded += len(frames)
        self.counts.delta_frames += sum(not frame.key_frame for frame in frames)
        for frame in frames:
            whole(frame)
        return frames

    def shown(self) -> Shown:
        """Read all packets' headers and return what they tell of the frames."""
        found: list[tuple[int, bool, int]] = []
        for packet in self.packets():
            if packet.is_discard:
                continue
            time = packet.dts if packet.pts is None else packet.pts
            if time is None:
                raise Undecodable(f"packet {len(found)} has no time")
            when = time if packet.dts is None else packet.dts
            found.append((time, packet.is_keyframe, when))
        if not found:
            raise Undecodable("it has no frames")
        promised, there = self.stream.frames, self.counts.packets_read
        if there < promised:
            raise Undecodable(f"it ends after {there} of the {promised} frames that it promises")
        found.sort()
        times = tuple(time for time, _, _ in found)
        if len(set(times)) != len(times):
            raise Undecodable("two of its frames are shown at one time")
        keys = {place: when for place, (_, is_key, when) in enumerate(found) if is_key}
        return Shown(times, tuple(keys), keys, float(self.stream.time_base or 0))

    def from_keyframe(self, shown: Shown, place: int) -> Iterator[Packet[VideoStream]]:
        """Seek, and yield the packets from the keyframe at ``place`` on.

        Some formats seek by when a packet is shown, some by when it is decoded; where the first
        lands behind the keyframe the second lands at it or before.
        """
        wanted = shown.times[place]
        for offset in (wanted, min(wanted, shown.decode_times[place])):
            self.container.seek(offset, stream=self.stream)
            self.counts.seeks += 1
            packets = self.packets()
            for packet in packets:
                time = packet.dts if packet.pts is None else packet.pts
                if time == wanted:
                    return _chained(packet, packets)
                if packet.dts is not None and packet.dts > shown.decode_times[place]:
                    break
        raise Undecodable(f"its keyframe at frame {place} cannot be found by seeking")


def _chained(
    first: Packet[VideoStream], rest: Iterator[Packet[VideoStream]]
) -> Iterator[Packet[VideoStream]]:
    yield first
    yield from rest


@contextmanager
def opened(path: Path, threads: int) -> Iterator[Opened]:
    """Open a clip, and name whatever goes wrong with it while it is open.

    The decoder conceals nothing: what a file has lost would be made up, differently by each arm.

    Raises
    ------
    Undecodable
        The file is missing, no video or broken.
    """
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise Undecodable("it has no video stream")
            stream = container.streams.video[0]
            context = stream.codec_context
            if context is None:
                raise Undecodable("nobody here can decode its format")
            context.options = {"max_pixels": str(MOST_PIXELS), "err_detect": "explode"}
            context.thread_count = threads
            context.thread_type = "SLICE" if threads == 1 else "AUTO"
            yield Opened(container, stream)
    except (av.error.FFmpegError, OSError) as error:
        raise Undecodable(_said(error)) from error
    except (ValueError, OverflowError, UnicodeDecodeError, EOFError) as error:
        raise Undecodable(f"it cannot be read: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Say what a library says, without the path that it repeats."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


def whole(frame: VideoFrame) -> None:
    """Refuse a frame that the decoder calls damaged, whether it is picked or others build on it.

    Raises
    ------
    Undecodable
        It is.
    """
    if frame.is_corrupt:
        raise Undecodable(f"the frame at time {frame.pts} is damaged")


def pixels(frame: VideoFrame) -> Pixels:
    """Return a frame's pixels; raises :class:`Undecodable` where its picture is too large."""
    if frame.width * frame.height > MOST_PIXELS:
        raise Undecodable(f"a picture of {frame.width} x {frame.height} pixels")
    found: Any = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(found, np.uint8)
