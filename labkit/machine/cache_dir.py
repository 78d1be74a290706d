"""The user's cache folder: everything in it is named by its content.

Files and folders are written under a temporary name in the same folder and renamed, so
that two processes may build the same thing at once and nobody ever reads half of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from labkit.machine import numba_sources


class CacheError(ValueError):
    """The cache folder cannot be written; said in one line."""


def root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder (absolute; it may not exist yet).

    Parameters
    ----------
    environ
        Where ``LABKIT_CACHE`` is looked up, by default ``os.environ``. Unset or empty:
        the platform's user cache folder.
    """
    named = (os.environ if environ is None else environ).get("LABKIT_CACHE", "")
    if named:
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees all of it or nothing.

    Raises
    ------
    CacheError
        The folder cannot be made or written.
    """
    with building_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def building_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``; rename it to ``path`` when the block ends.

    An exception inside the block leaves ``path`` as it was and removes the temporary.
    """
    with _one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.touch(exist_ok=False)
    try:
        yield temporary
        with _one_line_errors(path):
            _fsync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def building_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``; rename it to ``path`` when the block ends.

    Where another process was faster its folder is kept and ours is dropped: the names
    are content addresses, so both hold the same bytes.
    """
    with _one_line_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.mkdir()
    try:
        yield temporary
        for item in temporary.iterdir():
            _fsync(item)
        with _one_line_errors(path):
            try:
                temporary.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write {path.parent}: {error.strerror or error}; "
            "set LABKIT_CACHE to a folder that can be written"
        ) from None


def _temporary(path: Path) -> Path:
    """Name a neighbour of ``path`` that nobody else uses; modes then follow the umask."""
    return path.with_name(f".{path.name[:80]}-{uuid.uuid4().hex[:12]}")


def _fsync(path: Path) -> None:
    """Put the bytes on disk before the rename: a crash must not leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numba_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return where numba keeps its machine code, named by the sources that it is made of.

    numba renews a cached function when its own file, numba itself or the CPU changes, but
    not when a file does whose functions or constants it has compiled in: a changed kernel
    would run as it was.

    Parameters
    ----------
    environ
        As in ``root``.
    """
    digest = hashlib.sha256()
    for path, text in numba_sources.read_sources(Path(__file__).resolve().parents[1]).items():
        digest.update(path.encode())
        digest.update(text)
    return root(environ) / "numba" / digest.hexdigest()[:16]
