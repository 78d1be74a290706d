"""labkit's pick methods as video loaders of vLLM, ``labkit_seek``, ``labkit_keyframes`` and so on.

In the process that makes the ``LLM``, before it does::

    from labkit.vllm_video import register

    register()
    llm = LLM(..., media_io_kwargs={"video": {"video_backend": "labkit_seek", "num_frames": 16}})

Older versions of vLLM take the name from the environment: ``VLLM_VIDEO_LOADER_BACKEND``.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import ConfigError, FramePicks, require
from labkit.config.package_extras import DISTRIBUTION

LOADERS = {f"labkit_{how.value}": how for how in FramePicks}


def register() -> tuple[str, ...]:
    """Add labkit's loaders to vLLM's registry, and return their names.

    Raises ``ConfigError`` if vLLM or PyAV is not installed, or vLLM has no registry of video
    loaders.
    """
    try:
        import_module("labkit.workload.video.frame_decoding")
        import_module("av")
        vllm = import_module("vllm.multimodal.video")
        registry, base = vllm.VIDEO_LOADER_REGISTRY, vllm.VideoLoader
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the module {error.name} is not installed; run: "
            f"pip install vllm '{DISTRIBUTION}[video]'"
        ) from None
    except AttributeError as error:
        raise ConfigError(f"this vLLM has no registry of video loaders: {error}") from None
    for name in LOADERS:
        load_bytes = staticmethod(partial(_load_bytes, name))
        registry.register(name)(type(name, (base,), {"load_bytes": load_bytes}))
    return tuple(LOADERS)


def _load_bytes(
    name: str, data: bytes, num_frames: int = -1, **options: object
) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    refused = ", ".join(f"{option}={value!r}" for option, value in options.items())
    require(not refused, f"{name} takes num_frames alone, not {refused}")
    return load(data, LOADERS[name], num_frames, name)


def load(
    data: bytes, how: FramePicks, num_frames: int = -1, backend: str = "labkit"
) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """Return a clip's picked frames and their metadata, as a loader of vLLM does.

    The pixels are uint8 [frames, height, width, 3] in RGB, the metadata Hugging Face's for videos.
    Its ``frames_indices`` are true positions in the clip, so a model that embeds the time of a
    frame sees a repeated frame at one moment.

    ``data``: the content of a video file. ``how``: the pick method, as in ``workload.picks``
    (docs/video.md). ``num_frames``: -1 for all frames, or all keyframes if ``how`` picks keyframes.
    ``backend``: the loader's name in the metadata. Raises ``ConfigError`` if ``num_frames`` is
    neither positive nor -1, and ``ValueError`` if the clip cannot be decoded.
    """
    from labkit.workload.video.clip_reader import open_clip
    from labkit.workload.video.frame_decoding import decode_indexed
    from labkit.workload.video.frame_selection import Undecodable, picks_exact_positions

    require(num_frames == -1 or num_frames >= 1, f"num_frames={num_frames}: 1 or more, or -1")
    try:
        with open_clip(BytesIO(data), threads=1) as clip:
            index = clip.frame_index()
            every = len(index) if picks_exact_positions(how) else len(index.keyframes)
            decoded = decode_indexed(clip, index, how, every if num_frames == -1 else num_frames)
            rate = float(clip.stream.average_rate or 0)
    except Undecodable as error:
        raise ValueError(f"{backend}: {error}") from None
    fps = rate or (len(index) - 1) / (index.seconds[-1] or 1.0) or 1.0
    pixels = np.stack([decoded.frames[position] for position in decoded.picks])
    return pixels, {
        "total_num_frames": len(index),
        "fps": fps,
        "duration": len(index) / fps,
        "video_backend": backend,
        "frames_indices": list(decoded.picks),
        "do_sample_frames": False,  # the processor must not pick again
    }
