"""The user's cache folder, in which everything is named by its content.

Files and folders are written under a temporary name in the same folder and then renamed. So two
processes may build the same entry at once, and no process ever reads half of one.
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
    """The cache folder cannot be written; one line."""


def root(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder, an absolute path that may not exist yet.

    Parameters
    ----------
    environ
        Holds ``LABKIT_CACHE``; by default ``os.environ``. Where the variable is unset or empty,
        the platform's user cache folder is returned.
    """
    configured = (os.environ if environ is None else environ).get("LABKIT_CACHE", "")
    if configured:
        return Path(configured).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("labkit", appauthor=False)


def write_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees all of it or nothing.

    Raises
    ------
    CacheError
        The folder cannot be created or written.
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

    Where another process has created ``path`` meanwhile, its folder stays and ours is removed.
    Names are content addresses, so both hold the same bytes.
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
    """Return an unused path beside ``path``; created normally, so its mode follows the umask."""
    return path.with_name(f".{path.name[:80]}-{uuid.uuid4().hex[:12]}")


def _fsync(path: Path) -> None:
    """Flush to disk before the rename, so that a crash does not leave an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numba_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of numba's compiled code, named by a digest of the sources it depends on.

    numba recompiles a cached function when its own file, numba or the CPU changes, but not when
    another file changes whose functions or constants are compiled in. Without the digest a changed
    kernel would run as it was before.

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
