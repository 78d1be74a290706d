"""A loader of video frames for a model's preprocessor, by any of labkit's pick methods.

``frames("clip.mp4", 16)`` decodes keyframes alone, ``frames("clip.mp4", 16, "seek")`` exact frames.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.config import FramePicks, require
from labkit.config.option_index import did_you_mean
from labkit.config.package_extras import require_packages
from labkit.workload.video.frame_decoding import decode_picks
from labkit.workload.video.frame_selection import Undecodable


class ClipFrames(NamedTuple):
    """Frames of a clip, in order of time.

    ``pixels``: uint8 [frames, height, width, 3], RGB. ``indices``: the position of each frame in
    the clip, int64 [frames].
    """

    pixels: NDArray[np.uint8]
    indices: NDArray[np.int64]


def frames(
    path: str | PathLike[str], num_frames: int, how: str = "keyframes", *, threads: int = 1
) -> ClipFrames:
    """Return frames of a clip, decoded with PyAV (extra ``video``).

    ``num_frames``: how many; ``keyframes_unique`` may return fewer. ``how``: the pick method, as in
    ``workload.picks`` (docs/video.md): ``stream`` and ``seek`` return evenly spaced frames,
    ``keyframes``, ``keyframes_unique`` and ``nearest`` only keyframes. ``threads``: the decoder's.

    Raises ``ConfigError`` if ``num_frames`` or ``threads`` is not positive, ``how`` is unknown, or
    PyAV is not installed; ``ValueError``, one line that names the file, if the clip cannot be
    decoded; ``FileNotFoundError`` if there is none.
    """
    methods = [method.value for method in FramePicks]
    known = did_you_mean(how, methods) or f"; it must be one of: {', '.join(methods)}"
    require(how in methods, f"how={how}: there is no such pick method{known}")
    require(num_frames >= 1, f"num_frames={num_frames}: it must be 1 or more")
    require(threads >= 1, f"threads={threads}: it must be 1 or more")
    require_packages(("av",), "video")
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        decoded = decode_picks(file, FramePicks(how), num_frames, threads)
    except Undecodable as error:
        raise ValueError(f"{file}: {error}") from None
    pixels = np.stack([decoded.frames[index] for index in decoded.picks])
    return ClipFrames(pixels, np.array(decoded.picks, np.int64))
