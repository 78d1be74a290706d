"""The user's cache folder. An entry's name is a digest of everything it is built from.

Files and folders are written under a temporary name in the same folder and then renamed. So two
processes may build the same entry at the same time, and no process ever reads an incomplete entry.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

ABANDONED_S = 600.0  # an older folder without a lock: processes of earlier versions take none
NAMES_FILE = ".labkit-files"  # in a folder, what was written into it
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The list that ``recorded_entries`` has yielded in this context; None outside of it.
_recorded: ContextVar[list[Path] | None] = ContextVar("recorded cache entries", default=None)


class CacheError(ValueError):
    """The cache folder cannot be written or locked. The message is one line."""

    outcome = "refused"  # of a run that raises it (labkit.experiment.worker.run_failures)


def root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder, an absolute path that may not exist yet.

    ``environ``: the environment variables, by default ``os.environ``. If ``LABKIT_CACHE`` is unset
    or empty, the platform's user cache folder is returned.
    """
    if configured := (os.environ if environ is None else environ).get("LABKIT_CACHE", ""):
        return Path(configured).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically: a reader sees the complete file or no file.

    Raises ``CacheError`` if the folder cannot be created or written.
    """
    with building_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def recorded_entries() -> Iterator[list[Path]]:
    """Yield a list that collects the paths of all entries written inside the context."""
    entries: list[Path] = []
    token = _recorded.set(entries)
    try:
        yield entries
    finally:
        _recorded.reset(token)


def _record(path: Path) -> None:
    if (entries := _recorded.get()) is not None:
        entries.append(path)


@contextmanager
def building_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``, and rename it to ``path`` when the context ends.

    An exception inside the context leaves ``path`` unchanged and removes the temporary file.
    """
    with one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.touch(exist_ok=False)
    try:
        with full_disk_named(path):
            yield temporary
        with one_line_errors(path):
            _fsync(temporary)
            temporary.replace(path)
        _record(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def building_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``, and rename it to ``path`` when the context ends.

    If another process has created ``path`` meanwhile, that folder stays and the new one is removed.
    Both have the same content, because entries are named by what they are built from. What a killed
    process left of the same entry is removed.
    """
    with one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        temporary = _temporary(path)
        temporary.mkdir()
    lock = _lock(temporary)
    try:
        with full_disk_named(path):
            yield temporary
            names = os.fsencode("\0".join(sorted(os.listdir(temporary))))
            (temporary / NAMES_FILE).write_bytes(names)
        for item in temporary.iterdir():
            if not item.is_symlink():
                _fsync(item)
        with one_line_errors(path):
            try:
                temporary.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
            else:
                _record(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary folders of ``path`` that no living process builds in."""
    prefix = f".{path.name[:80]}-"
    for left in path.parent.iterdir():
        if not left.name.startswith(prefix) or not left.is_dir():
            continue
        with suppress(OSError):
            is_old = time.time() - left.stat().st_mtime > ABANDONED_S
            lock = _lock(left) if is_old else None
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that locks a folder; None if it is locked, or the file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def has_directory(path: Path) -> bool:
    """Return whether an entry that is a folder exists. One that lost a file is removed.

    Programs that clean the user's cache folder remove single files that are old.
    """
    try:
        names = os.fsdecode((path / NAMES_FILE).read_bytes()).split("\0")
    except OSError:
        return path.is_dir()  # written by an earlier version, without the list
    if all((path / name).exists() for name in names):
        return True
    rest = _temporary(path)
    with suppress(OSError):  # another process has removed it
        path.rename(rest)
    shutil.rmtree(rest, ignore_errors=True)
    return False


def wait_for_lock(file: IO[str], on_wait: Callable[[], None] = lambda: None) -> None:
    """Lock an open file; if another process has locked it, call ``on_wait`` and wait.

    Raises ``CacheError`` if the file system has no locks.
    """
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise CacheError(
            f"cannot lock {file.name}: {error.strerror or error}; "
            "set LABKIT_CACHE to a folder on a file system with locks"
        ) from None


def entry_bytes(path: Path) -> int:
    """Return the size of an entry, a file or a folder of files, in bytes."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Raise ``CacheError`` where the system refuses to write an entry, or its folder."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write {path.parent}: {error.strerror or error}; "
            "set LABKIT_CACHE to a folder that can be written"
        ) from None


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raise ``CacheError`` if the disk is full; other errors are the caller's own."""
    try:
        yield
    except Exception as error:
        # A library or program that writes in its own language has only the system's text.
        full = [text for text in map(os.strerror, FULL_DISK) if text in str(error)]
        if isinstance(error, CacheError) or not full:
            raise
        raise CacheError(
            f"cannot write {path.parent}: {full[0]}; free space there, or set LABKIT_CACHE "
            "to a folder on another disk"
        ) from None


def _temporary(path: Path) -> Path:
    """Return an unused path beside ``path``, without the mode that files of ``tempfile`` have."""
    return path.with_name(f".{path.name[:80]}-{uuid.uuid4().hex[:12]}")


def _fsync(path: Path) -> None:
    """Flush a file to disk, so that a crash after the rename does not leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numba_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of numba's compiled code, which has a folder for each module's kernels."""
    return root(environ) / "numba"
