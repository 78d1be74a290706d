"""Video clips, and how their frames are picked and decoded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, option, require

MAX_CLIP_FRAMES = 200_000  # of a synthetic clip


class FramePicks(Enum):
    """Which frames are picked from a clip, and how the decoder reaches them.

    stream: evenly spaced frames; every frame before them is decoded. seek: the same frames, each
    decoded from the keyframe before it. keyframes: evenly spaced entries of the list of keyframes.
    nearest: for each frame that stream picks, the nearest keyframe. keyframes_unique: the frames
    of keyframes, each only once.
    """

    stream = "stream"
    seek = "seek"
    keyframes = "keyframes"
    nearest = "nearest"
    keyframes_unique = "keyframes_unique"


class Decoder(Enum):
    """Video decoder: PyAV or OpenCV (which can only stream)."""

    pyav = "pyav"
    opencv = "opencv"


@dataclass
class Clip(Group, place="workload.made"):
    """A synthetic clip: moving shapes, with events at known frames."""

    name: str = option("", "Name of the clip in reports.")
    seconds: float = option(
        10.0, "Length, a whole number of frames.", gt=0, le=7200, unit="seconds"
    )
    fps: int = option(25, "Frames per second.", ge=1, le=240)
    gop: int | None = option(
        None, "GOP size: frames between keyframes.", ge=1, le=10_000, unit="frames",
        null_means="a single keyframe, the first frame",
    )  # fmt: skip
    width: int = option(320, "Frame width.", ge=64, le=1920, multiple_of=2, unit="pixels")
    height: int = option(180, "Frame height.", ge=48, le=1080, multiple_of=2, unit="pixels")
    seed: int = option(0, "Seed of the picture's content.", ge=0, le=(1 << 32) - 1)
    events: int = option(
        1, "Events of each kind: colour change, direction change, collision.", ge=0,
        le=1000,
    )  # fmt: skip
    frames: int | None = option(
        None, "Frames to pick.", ge=1, le=4096, unit="frames", null_means="workload.frames"
    )
    requests: int = option(
        1, "Requests for the clip in the throughput measurement (requests/s).", ge=0, le=1000
    )

    def __post_init__(self) -> None:
        require(bool(self.name), "workload.made: every clip needs a name")
        super().__post_init__()
        where = f"workload.made: clip {self.name!r}"
        total = self.seconds * self.fps
        require(
            self.length >= 1 and abs(total - self.length) < 1e-6,
            f"{where}: seconds={self.seconds:g} at fps={self.fps} makes {total:g} frames, which "
            "must be a whole number",
        )
        require(
            self.length <= MAX_CLIP_FRAMES,
            f"{where} has {self.length} frames; it must have at most {MAX_CLIP_FRAMES}",
        )
        require(
            3 * self.events < self.length or self.events == 0,
            f"{where}: {self.events} events of each kind do not fit into {self.length} frames",
        )
        narrowest = 2 * (self.height // 6) + 4  # two shapes side by side, and room to move
        require(
            self.width >= narrowest,
            f"{where}: width={self.width}: must be {narrowest} or more with height={self.height}",
        )

    @property
    def length(self) -> int:
        return round(self.seconds * self.fps)

    def key(self, name: str) -> str:
        """Return an option's key for error messages; it includes the clip's name."""
        return f"workload.made: clip {self.name!r}: {name}"
