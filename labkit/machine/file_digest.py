"""SHA-256 digests of large files, each computed once and then remembered in the user's cache.

A digest of samples would miss most small changes of a large file. A digest of the file's size and
times alone would differ between two copies.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from labkit.machine import cache_entries

MIN_CACHED_BYTES = 1 << 20  # smaller files are read every time
SETTLED_S = 2.0  # a later change within the same tick of the file system's clock would be missed


class FileState(NamedTuple):
    """What changes when a file is written or replaced."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int  # of the inode: an edit that restores the modification time changes it


def file_state(path: Path) -> FileState:
    """Return the state of a file."""
    stat = path.stat()
    return FileState(stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hex.

    A remembered digest is valid while the file keeps its path, inode, size and times of change.
    Raises ``OSError`` if the file cannot be read. Raises ``CacheError`` if the cache folder cannot
    be written.
    """
    state = file_state(path)
    key = hashlib.sha256(repr((str(path.absolute()), state)).encode()).hexdigest()[:32]
    entry = cache_entries.root() / "digests" / key
    try:
        if state.size >= MIN_CACHED_BYTES and len(text := entry.read_text("ascii")) == 64:
            return text
    except (OSError, UnicodeDecodeError):
        pass  # not remembered
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    unchanged = file_state(path) == state and time.time() - state.changed_ns / 1e9 > SETTLED_S
    if state.size >= MIN_CACHED_BYTES and unchanged:
        cache_entries.write_file(entry, digest.encode())
    return digest
