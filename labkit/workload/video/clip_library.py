"""The clips of a video workload: synthesised clips, or the files of the user's folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labkit.config import Workload, require
from labkit.workload.video import clip_synthesis
from labkit.workload.video.clip_synthesis import Event, planted

MAX_CLIPS = 10_000
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class ClipSource:
    """A clip's file and its requests.

    ``num_frames``: frames to pick. ``requests``: number of requests for the clip in each arm's job
    (:mod:`labkit.workload.video.interleaved_frame_decoding`). ``events``: the planted events; None
    for a user's clip.
    """

    name: str
    path: Path
    num_frames: int
    requests: int = 1
    events: tuple[Event, ...] | None = None

    @property
    def bytes(self) -> int:
        """Size of the file; 0 if it no longer exists."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def read_through(self) -> None:
        """Read the file once, so that the operating system caches it before any request."""
        with suppress(OSError), self.path.open("rb") as file:  # the requests will say so
            while file.read(CHUNK):
                pass


def sources(workload: Workload) -> list[ClipSource]:
    """Return a workload's clips in order; synthesise missing ones of ``workload.made``.

    Raises ``ConfigError`` or ``CacheError`` if there are no clips, or a clip cannot be synthesised.
    """
    if workload.clips is not None:
        files = files_of(workload.clips)
        return [ClipSource(path.name, path, workload.frames) for path in files]
    return [
        ClipSource(
            clip.name,
            clip_synthesis.synthesised_file(clip),
            clip.frames or workload.frames,
            clip.requests,
            tuple(planted(clip)),
        )
        for clip in workload.made
    ]


def files_of(folder: str) -> Sequence[Path]:
    """Return a folder's files sorted by name, without hidden files and subfolders.

    Raises ``ConfigError`` if the path is not a readable folder, or the folder has no files or more
    than ``MAX_CLIPS``.
    """
    path = Path(folder).expanduser()
    where = f"workload.clips={folder}"
    require(path.is_dir(), f"{where} is not a folder")
    try:
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError as error:
        require(False, f"{where}: {error.strerror or error}")
    require(bool(files), f"{where} has no files")
    require(
        len(files) <= MAX_CLIPS, f"{where} has {len(files)} files; it must have at most {MAX_CLIPS}"
    )
    return [file.absolute() for file in files]
