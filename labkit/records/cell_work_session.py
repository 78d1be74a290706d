"""Cell sessions: one process's work on a cell, until the process ends or is killed.

``sitting.json`` in a cell's folder names the process that works on the cell, or the last process
that did and how it ended. The process holds a lock on the file and writes it in place
(:mod:`labkit.experiment.schedule.cell_folder_lock`). If the process was killed or its node was
lost, the file has no end time.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.records.study_archive import ArchivePath, StudyPath

SESSION_DONE = "done"
SESSION_FILE = "sitting.json"


@dataclass(frozen=True, slots=True)
class CellSession:
    """One process's work on a cell. The attributes are the keys of ``sitting.json``."""

    host: str  # its name, as in a record's environment
    pid: int
    started: str  # UTC, as in records
    job: str | None = None  # the cluster's name for the job; None outside a cluster
    ended: str | None = None  # None while the session lasts
    how: str | None = None  # :data:`SESSION_DONE`, or the reason that the session was stopped

    def end(self, when: str, how: str) -> CellSession:
        """Return a copy of the session with the time and the reason of its end."""
        return replace(self, ended=when, how=how)

    def describe(self, locked: bool) -> str:
        """Return a sentence about the session. ``locked``: whether a process holds the lock."""
        process = f"process {self.pid} on host {self.host}"
        who = process if self.job is None else f"{self.job} ({process})"
        if locked:
            return f"{who} has been working on it since {self.started}"
        if self.how is None:
            return f"{who} began at {self.started} and was killed, or its node is lost"
        if self.how == SESSION_DONE:
            return f"{who} ended its work at {self.ended}"
        return f"{who} was stopped at {self.ended}: {self.how}"

    def to_text(self) -> str:
        """Return the file's content."""
        return json.dumps(asdict(self), indent=2) + "\n"


def session_path(cell_dir: Path) -> Path:
    """Return the path of a cell's session file."""
    return cell_dir / SESSION_FILE


def describe_last_session(cell_dir: StudyPath) -> str:
    """Return a sentence about the process that is working on a cell, or last worked on it."""
    session, locked = read_session(cell_dir), is_locked(cell_dir)
    if session is None:
        return "another process is working on it" if locked else "no process has worked on it"
    return session.describe(locked)


def is_locked(cell_dir: StudyPath) -> bool:
    """Return whether a process holds a cell's lock.

    A lock held on another host is seen only if the file system shares locks between hosts. A cell
    in an archive is never locked.
    """
    if isinstance(cell_dir, ArchivePath):
        return False
    try:
        with open(session_path(cell_dir), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_session(cell_dir: StudyPath) -> CellSession | None:
    """Return a cell's last session, or None if there is no readable session file."""
    try:
        data: Any = json.loads((cell_dir / SESSION_FILE).read_text(encoding="utf-8"))
        return CellSession(**data)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
