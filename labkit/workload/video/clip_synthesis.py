"""Synthetic clips: shapes in three lanes over a moving background, with planted events.

In the first lane a disc changes colour, in the second a square changes direction, in the third
two discs collide. The same clip always has the same bytes: a single thread encodes the clip, and
the file contains no date. A clip's file name in the cache is a hash of all inputs that determine
its bytes. Whether picked frames show the events is not a model's accuracy: no model is involved.
"""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from labkit.config import Clip, ConfigError, to_plain
from labkit.config.package_extras import DISTRIBUTION
from labkit.machine import cache_entries
from labkit.workload.video.clip_reader import Pixels

if TYPE_CHECKING:
    from av.video.stream import VideoStream

Mask = NDArray[np.bool_]
FORMAT = 2  # version of the drawing and the encoding; part of a clip's key in the cache
ENCODER = "libx264"
# A constant quantiser: with x264's rate control and macroblock tree, one in ten to forty encodes of
# the same pictures differed (measured with libavcodec 62.28); without them none did.
CONSTANT_QUANTISER = "qp=28:mbtree=0:aq-mode=0:weightp=0"
COLOURS = ((230, 60, 60), (60, 110, 235), (240, 205, 60), (60, 190, 110))
NOT_IN_KEY = ("name", "frames", "requests")  # a clip's fields that do not change its file
KINDS = ("colour change", "direction change", "collision")


def synthesised_file(clip: Clip) -> Path:
    """Return the path of a clip's file in the cache; synthesise the file if it is missing.

    Raises ``ConfigError`` if this PyAV has no H.264 encoder. Raises ``CacheError`` if the cache
    folder cannot be written.
    """
    path = cache_entries.root() / "clips" / f"{_key(clip)}.mp4"
    if not path.is_file():
        with cache_entries.building_file(path) as draft:
            synthesise(clip, draft)
    return path


def _key(clip: Clip) -> str:
    import av

    drawn = {name: value for name, value in to_plain(clip).items() if name not in NOT_IN_KEY}
    identity = {"format": FORMAT, "codec": av.library_versions["libavcodec"], **drawn}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def synthesise(clip: Clip, path: Path) -> None:
    """Encode a clip as H.264 in MP4, with B-frames and closed GOPs of the same length."""
    import av

    if ENCODER not in av.codecs_available:
        raise ConfigError(
            f"workload.made: this PyAV has no {ENCODER}; install its wheel "
            f"(pip install --only-binary av '{DISTRIBUTION}[video]'), or set workload.clips=DIR"
        )
    gop = clip.gop or clip.length + 1
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        added = container.add_stream(
            ENCODER,
            rate=Fraction(clip.fps),
            options={
                "preset": "veryfast",
                "flags": "+bitexact",
                "x264-params": f"keyint={gop}:min-keyint={gop}:scenecut=0:open-gop=0:bframes=2:"
                f"threads=1:{CONSTANT_QUANTISER}",
            },
        )
        stream = cast("VideoStream", added)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.codec_context.thread_count = 1
        for picture in pictures(clip):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


class Scene(NamedTuple):
    """The shapes of a frame: left edges, the disc's colour, half the gap of the two discs."""

    disc: int
    colour: int
    square: int
    gap: int


def scenes(clip: Clip) -> Iterator[Scene]:
    """Yield the scene of each frame. A shape is as wide as ``shape_size``."""
    size = shape_size(clip)
    colours, turns, hits = (event_frames(clip, kind) for kind in KINDS)
    travelled = 0
    for number in range(clip.length):
        if number:
            travelled += -2 if bisect_right(turns, number) % 2 else 2
        apart = min((abs(number - hit) for hit in hits), default=clip.width)
        yield Scene(
            disc=3 * number % (clip.width - size),
            colour=bisect_right(colours, number) % len(COLOURS),
            square=travelled % (clip.width - size),
            gap=min(3 * apart, clip.width - 2 * size - 2) // 2,
        )


def shape_size(clip: Clip) -> int:
    """Return the width of a shape: half of its lane, which is a third of the frame."""
    return clip.height // 3 // 2


def pictures(clip: Clip) -> Iterator[Pixels]:
    """Draw a clip's frames one by one, as uint8 [height, width, 3]."""
    ground = _ground(clip)
    lane, size, middle = clip.height // 3, shape_size(clip), clip.width // 2
    disc, square = _disc(size), np.ones((size, size), bool)
    first, second, third = (lane * i + lane // 4 for i in range(3))
    for number, scene in enumerate(scenes(clip)):
        shift = number // 2 % clip.width
        picture = ground[:, shift : shift + clip.width].copy()
        _stamp(picture, disc, scene.disc, first, COLOURS[scene.colour])
        _stamp(picture, square, scene.square, second, COLOURS[2])
        _stamp(picture, disc, middle - size - scene.gap, third, COLOURS[1])
        _stamp(picture, disc, middle + scene.gap, third, COLOURS[3])
        yield picture


def _ground(clip: Clip) -> Pixels:
    """Return a background twice as wide as the frame: uint8 [height, 2 * width, 3]."""
    draw = np.random.default_rng([clip.seed, clip.width, clip.height])
    coarse = draw.integers(20, 110, (-(-clip.height // 8), -(-clip.width // 8), 3))
    tile = coarse.repeat(8, axis=0).repeat(8, axis=1)[: clip.height, : clip.width]
    tile = tile + draw.integers(0, 24, tile.shape)
    return np.concatenate([tile, tile], axis=1).astype(np.uint8)


def _disc(size: int) -> Mask:
    middle = (size - 1) / 2
    rows, columns = np.mgrid[:size, :size]
    inside: Mask = (rows - middle) ** 2 + (columns - middle) ** 2 <= (size / 2) ** 2
    return inside


def _stamp(picture: Pixels, shape: Mask, left: int, top: int, colour: tuple[int, int, int]) -> None:
    height, width = shape.shape
    picture[top : top + height, left : left + width][shape] = colour


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
