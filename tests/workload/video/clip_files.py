"""Small clips, and an independent count of what is in an MP4 file."""

from __future__ import annotations

import struct
from pathlib import Path

from labkit.config import Clip, Decoder, FramePicks, Workload
from labkit.workload.video import clip_synthesis

SMALL = {"width": 96, "height": 64}
WAYS = [(picks, Decoder.pyav) for picks in FramePicks] + [(FramePicks.stream, Decoder.opencv)]


def clip_of(length, gop=None, **more):
    return Clip(**{"name": f"{length}/{gop}", "seconds": length / 25, "gop": gop, "events": 0,
                   **SMALL, **more})  # fmt: skip


def synthesised_file(folder, frames, gop=None, **more) -> Path:
    """Synthesise a clip into a folder."""
    path = folder / f"{frames}-{gop}.mp4"
    if not path.exists():
        clip_synthesis.synthesise(clip_of(frames, gop, **more), path)
    return path


def edited_file(source, target, *edits) -> Path:
    """Write a clip with an edit list that shows, for each (first, frames), these frames of it."""
    data = bytearray(source.read_bytes())
    moov = data.rindex(b"moov")
    scales = (data.index(kind, moov) + 16 for kind in (b"mvhd", b"mdhd"))
    movie, media = (struct.unpack_from(">I", data, at)[0] for at in scales)
    at = data.index(b"elst", moov)
    (start,) = struct.unpack_from(">i", data, at + 16)  # of the first frame: B-frames delay it
    for kind in (b"moov", b"trak", b"edts", b"elst"):
        box = data.index(kind, moov) - 4
        (size,) = struct.unpack_from(">I", data, box)
        struct.pack_into(">I", data, box, size + 12 * (len(edits) - 1))
    struct.pack_into(">I", data, at + 8, len(edits))
    data[at + 12 : at + 24] = b"".join(
        struct.pack(">IiI", frames * movie // 25, start + first * media // 25, 1 << 16)
        for first, frames in edits
    )
    target.write_bytes(data)
    return target


def asks(picks, decoder=Decoder.pyav, frames=16, **more):
    """Return a video workload of one arm."""
    return Workload(
        name="t", kind="video", made=[clip_of(9)], picks=FramePicks(picks),
        decoder=Decoder(decoder), frames=frames, **{"warmup": 0, **more},
    )  # fmt: skip


def boxes(data, *path):
    """Yield the contents of an MP4 file's boxes of that path."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == path[0].encode():
            inside = data[at + 8 : at + size]
            yield from (boxes(inside, *path[1:]) if len(path) > 1 else [inside])
        at += size


def counted(path) -> tuple[int, list[int]]:
    """Count a file's samples by its stsz box; list its sync samples (from 0) by its stss box."""
    table = ("moov", "trak", "mdia", "minf", "stbl")
    data = path.read_bytes()
    (sizes,) = boxes(data, *table, "stsz")
    (samples,) = struct.unpack(">I", sizes[8:12])
    sync = next(boxes(data, *table, "stss"), None)
    if sync is None:
        return samples, list(range(samples))
    (number,) = struct.unpack(">I", sync[4:8])
    return samples, [n - 1 for n in struct.unpack(f">{number}I", sync[8 : 8 + 4 * number])]
