"""A sitting: one process's work on a cell, until its end or its death.

``sitting.json`` in a cell's folder says who works on it, or who did last and how that ended.
Whoever works holds the file's lock and writes it in place (:mod:`labkit.experiment.file_locks`): a
process that is killed, or whose node is lost, leaves a sitting without an end.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DONE = "done"


@dataclass(frozen=True, slots=True)
class Sitting:
    """Who works on a cell, or did.

    ``host``: as in a record's environment. ``job``: the cluster's name for it, None without a
    cluster. ``started``, ``ended``: UTC, as in records; ``how`` it ended, :data:`DONE` or what
    stopped it. Both are None until it ends.
    """

    host: str
    pid: int
    started: str
    job: str | None = None
    ended: str | None = None
    how: str | None = None

    def end(self, when: str, how: str) -> Sitting:
        """Return the sitting as it ended."""
        return dataclasses.replace(self, ended=when, how=how)

    @property
    def who(self) -> str:
        """The process, in words."""
        place = f"process {self.pid} on host {self.host}"
        return place if self.job is None else f"{self.job} ({place})"

    def sentence(self, held: bool) -> str:
        """Say what became of it; ``held``: whether somebody holds the cell's lock."""
        if held:
            return f"{self.who} works on it since {self.started}"
        if self.how is None:
            return f"{self.who} began at {self.started} and was killed, or its node is lost"
        if self.how == DONE:
            return f"{self.who} ended its work at {self.ended}"
        return f"{self.who} was stopped at {self.ended}: {self.how}"

    def to_text(self) -> str:
        """Return the file's content."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def sitting_path(cell_dir: Path) -> Path:
    """Return where a cell's sitting is kept."""
    return cell_dir / "sitting.json"


def last_sitting(cell_dir: Path) -> str:
    """Say who works on a cell, or did last and what became of that."""
    found, held = read_sitting(cell_dir), is_held(cell_dir)
    if found is None:
        return "another process works on it" if held else "nobody has worked on it"
    return found.sentence(held)


def is_held(cell_dir: Path) -> bool:
    """Tell whether somebody works on a cell, as far as the file system's locks reach."""
    try:
        with open(sitting_path(cell_dir), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_sitting(cell_dir: Path) -> Sitting | None:
    """Read a cell's last sitting; None where there was none, or its file says nothing yet."""
    try:
        found: Any = json.loads(sitting_path(cell_dir).read_text(encoding="utf-8"))
        return Sitting(**found)
    except (OSError, ValueError, TypeError):
        return None
