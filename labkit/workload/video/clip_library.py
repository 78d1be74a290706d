"""The clips that a workload asks for: made ones, or those of a folder of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.config import Workload, require
from labkit.workload.video import clip_synthesis
from labkit.workload.video.planted_events import Event, planted

MOST_CLIPS = 10_000
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Source:
    """A clip, and what is asked of it.

    ``wanted``: frames to pick. ``requests``: how often the job asks for it. ``events``: what is
    planted; None where nobody knows what there is to see.
    """

    name: str
    path: Path
    wanted: int
    requests: int = 1
    events: tuple[Event, ...] | None = None

    @property
    def bytes(self) -> int:
        """Its file's size; 0 where there is none any more."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def read_through(self) -> None:
        """Read the file once, so that no arm is the one that brings it into memory."""
        try:
            with self.path.open("rb") as file:
                while file.read(CHUNK):
                    pass
        except OSError:
            pass  # its requests fail, with what is wrong


def sources(workload: Workload) -> list[Source]:
    """Return a workload's clips, in order; those that are made are synthesised.

    Raises
    ------
    ConfigError, CacheError
        There are no clips, or they cannot be made.
    """
    if workload.clips is not None:
        files = files_of(workload.clips)
        return [Source(path.name, path, workload.frames) for path in files]
    return [
        Source(
            clip.name,
            clip_synthesis.made(clip),
            clip.frames or workload.frames,
            clip.requests,
            tuple(planted(clip)),
        )
        for clip in workload.made
    ]


def files_of(folder: str) -> Sequence[Path]:
    """Return the files of a folder, sorted by name, without hidden ones; folders are left out.

    Raises
    ------
    ConfigError
        It is no folder, or holds no file or too many.
    """
    path = Path(folder).expanduser()
    where = f"workload.clips={folder}"
    require(path.is_dir(), f"{where}: not a folder")
    try:
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError as error:
        require(False, f"{where}: {error.strerror or error}")
    require(bool(files), f"{where}: there is no file in it")
    require(len(files) <= MOST_CLIPS, f"{where}: {len(files)} files; at most {MOST_CLIPS} clips")
    return [file.absolute() for file in files]
