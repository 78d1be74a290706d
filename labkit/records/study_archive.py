"""A study as one file: a zip archive that is read like the study's folder.

``STUDY.zip`` holds the study's reports as plain members and each cell as one member
``CELL.tar.xz``: the records of a cell are similar, so together they compress to a twentieth.
``unzip`` and ``tar`` restore the folder. Archiving a study twice gives identical bytes (with the
same xz and zlib), and the archive's comment ends with the SHA-256 of all bytes before it.

An archive is untrusted data: nothing in it is executed, and names, links, sizes and the digest are
checked before anything is used. :class:`ArchivePath` has the methods of :class:`pathlib.Path` that
readers of studies call, so they accept a folder or an archive.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import lzma
import os
import re
import secrets
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

from labkit.records.atomic_write import atomic_write
from labkit.records.run_record import RecordError, require

ARCHIVE_SUFFIX = ".zip"
CELL_SUFFIX = ".tar.xz"
COMMENT = re.compile(rb"labkit study 1 sha256 (?P<digest>[0-9a-f]{64})")
COMMENT_BYTES = len("labkit study 1 sha256 ") + 64
EPOCH = (1980, 1, 1, 0, 0, 0)
MAX_ARCHIVE_BYTES = 512 << 20
MAX_TOTAL_BYTES = 16 << 30  # of all files together, unpacked: 100,000 runs and more
MAX_CELL_BYTES = 512 << 20
MAX_FILES = 200_000
XZ_MEMORY_BYTES = 128 << 20
CELLS_IN_MEMORY = 2  # a cell and the cell that confirms it are read alternately
COMPRESSED_ALREADY = (".png", CELL_SUFFIX)
# Hydra's own settings and the output of servers name folders of the machine. Nothing reads them.
LEFT_OUT = ("multirun.yaml", "hydra.yaml", "*.log", "*.tmp")


def write_archive(path: Path, files: Mapping[str, bytes], cells: Mapping[str, Path]) -> str:
    """Write an archive by rename and return its SHA-256, as ``sha256sum`` prints it.

    ``files``: the content of each file of the study outside its cells, by path. ``cells``: the
    cells' folders by name. Raises ``RecordError``, and writes nothing, if a reader would refuse the
    archive (a name, a size), or a cell holds something that is not a regular file. Raises
    ``OSError`` if a file cannot be read or written.
    """
    # xz runs without the interpreter's lock, and needs 94 MB per thread.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        contents = list(pool.map(_pack_cell, cells.values()))
    names = (f"{name}{CELL_SUFFIX}" for name in cells)
    packed = dict(zip(names, contents, strict=True))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted({**files, **packed}.items()):
            _check_name(str(path), name)
            info = zipfile.ZipInfo(name, EPOCH)
            info.create_system, info.external_attr = 3, (stat.S_IFREG | 0o644) << 16
            stored = name.endswith(COMPRESSED_ALREADY)
            info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(info, content, compresslevel=None if stored else 9)
        archive.comment = b"labkit study 1 sha256 " + b"0" * 64
    body = buffer.getvalue()[:-64]
    digest = hashlib.sha256(body[: -COMMENT_BYTES + 64]).hexdigest()
    content = body + digest.encode()
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
        _check_readable(temporary, path)
    return hashlib.sha256(content).hexdigest()


def _check_readable(written: Path, path: Path) -> None:
    """Raise ``RecordError`` unless every reader of archives accepts what is to become ``path``."""
    try:
        archive = _open_archive(written)
        for name in archive.cells:
            archive.cell(name)
    except RecordError as error:
        raise RecordError(f"not written: {str(error).replace(str(written), str(path))}") from None


def _pack_cell(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in regular_files(folder):
            content = path.read_bytes()
            info = tarfile.TarInfo(f"{folder.name}/{name}")  # without owner, time or mode
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return lzma.compress(buffer.getvalue(), preset=6)


def regular_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files in a folder and their paths within it, sorted.

    Temporary files, logs and Hydra's own settings are left out. Raises ``RecordError`` if something
    in the folder is neither a regular file nor a directory, such as a link.
    """
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        require(
            stat.S_ISREG(mode) or stat.S_ISDIR(mode),
            f"{path} is a link or a special file; an archive holds regular files only",
        )
        if stat.S_ISREG(mode) and not any(map(path.match, LEFT_OUT)):
            yield path.relative_to(folder).as_posix(), path


def _check_name(archive: str, name: str) -> None:
    """Raise :class:`RecordError` unless ``name`` is a safe relative path on every platform."""
    parts = name.split("/")
    good = (
        0 < len(name) <= 1024
        and not {"", ".", ".."} & set(parts)
        and all(part.isprintable() and not set('\\:*?"<>|') & set(part) for part in parts)
        and all(len(part.encode()) <= 255 for part in parts)
        and not PurePosixPath(name).is_absolute()
    )
    require(good, f"{archive} is not a study archive: it has a file named {name[:80]!r}")


@dataclass
class StudyArchive:
    """An archive with checked digest, names and sizes. Cells are unpacked when they are read."""

    path: Path
    digest: str  # the SHA-256 in its comment
    _zip: zipfile.ZipFile
    _cells_in_memory: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _unpacked_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        infos, where = self._zip.infolist(), f"{self.path} is not a study archive"
        require(
            len(infos) <= MAX_FILES, f"{where}: it has {len(infos):,} files (limit {MAX_FILES:,})"
        )
        require(
            sum(info.file_size for info in infos) <= MAX_TOTAL_BYTES,
            f"{where}: its files hold more than {MAX_TOTAL_BYTES >> 30} GiB",
        )
        names = [info.filename for info in infos]
        unique = {name.casefold() for name in names}
        require(len(unique) == len(names), f"{where}: two files have the same name (ignoring case)")
        for info in infos:
            _check_name(str(self.path), info.filename)
            kind = stat.S_IFMT(info.external_attr >> 16)
            known = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            require(
                kind in (0, stat.S_IFREG) and known and not info.flag_bits & 1,
                f"{where}: {info.filename!r} must be a regular file that is stored or deflated and "
                "not encrypted",
            )
            # A cell's xz has limits of its own once it is read, so it may not unpack before.
            packed = info.compress_size if self._is_cell(info.filename) else MAX_CELL_BYTES
            require(
                info.file_size <= packed,
                f"{where}: {info.filename!r} is deflated, or has over {MAX_CELL_BYTES >> 20} MiB",
            )

    @cached_property
    def files(self) -> Collection[str]:
        """The names of the members that do not hold cells."""
        return dict.fromkeys(name for name in self._zip.namelist() if not self._is_cell(name))

    @cached_property
    def cells(self) -> Collection[str]:
        """The names of the cells."""
        names = filter(self._is_cell, self._zip.namelist())
        return dict.fromkeys(name.removesuffix(CELL_SUFFIX) for name in names)

    @staticmethod
    def _is_cell(name: str) -> bool:
        return name.endswith(CELL_SUFFIX) and "/" not in name

    def read(self, name: str) -> bytes:
        """Return the content of a member; raises :class:`RecordError` if it is damaged."""
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError) as error:
            raise RecordError(f"{self.path}: {name!r} is damaged: {error}") from None

    def cell(self, name: str) -> Mapping[str, bytes]:
        """Return a cell's files by path within its folder; raises :class:`RecordError`."""
        known = self._cells_in_memory
        if name not in known:
            while len(known) >= CELLS_IN_MEMORY:
                del known[next(iter(known))]
            known[name] = dict(self._unpack(name))
        return known[name]

    def _unpack(self, name: str) -> Iterator[tuple[str, bytes]]:
        where = f"{self.path}: cell {name!r}"
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
        try:
            raw = unpacker.decompress(self.read(f"{name}{CELL_SUFFIX}"), MAX_CELL_BYTES)
            whole = unpacker.eof and not unpacker.unused_data
            require(whole, f"{where} is truncated, or has more than {MAX_CELL_BYTES >> 20} MiB")
            self._unpacked_bytes[name] = len(raw)
            total = sum(self._unpacked_bytes.values())
            require(
                total <= MAX_TOTAL_BYTES,
                f"{self.path}: its cells have {total:,} bytes (limit {MAX_TOTAL_BYTES:,})",
            )
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
                members = archive.getmembers()
        except (lzma.LZMAError, tarfile.TarError, ValueError, OverflowError, MemoryError) as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"{where} is damaged: {error}") from None
        require(
            len(members) <= MAX_FILES, f"{where} has {len(members):,} files (limit {MAX_FILES:,})"
        )
        for member in members:
            _check_name(str(self.path), member.name)
            regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
            require(regular, f"{where}: {member.name!r} is a link or a special file")
            folder, _, inner = member.name.partition("/")
            content = raw[member.offset_data : member.offset_data + member.size]
            own = folder == name and bool(inner)
            require(own, f"{where}: {member.name!r} lies outside the cell's folder")
            require(len(content) == member.size, f"{where}: {member.name!r} is truncated")
            yield inner, content


@dataclass(frozen=True)
class ArchivePath:
    """A path within an archive, with the reading methods of :class:`pathlib.Path`.

    ``parts``: the names from the study's folder on; empty for the study itself.
    """

    archive: StudyArchive = field(compare=False)
    file: Path
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join((str(self.file), *self.parts))

    def __lt__(self, other: ArchivePath) -> bool:
        return (self.file, self.parts) < (other.file, other.parts)

    def __truediv__(self, name: str) -> ArchivePath:
        return ArchivePath(self.archive, self.file, (*self.parts, *name.split("/")))

    @property
    def name(self) -> str:
        """The last name of the path; the study's name for the study itself."""
        return self.parts[-1] if self.parts else self.file.stem

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> ArchivePath:
        return ArchivePath(self.archive, self.file, self.parts[:-1])

    def with_name(self, name: str) -> ArchivePath:
        return self.parent / name

    def is_file(self) -> bool:
        names, path = self._names()
        return path in names

    def is_dir(self) -> bool:
        is_cell = len(self.parts) == 1 and self._in_cell
        return not self.parts or is_cell or any(True for _ in self._children())

    def iterdir(self) -> Iterator[ArchivePath]:
        cells = () if self.parts else tuple(self.archive.cells)
        return (self / name for name in dict.fromkeys((*cells, *self._children())))

    def glob(self, pattern: str) -> Iterator[ArchivePath]:
        """Yield the paths in this folder whose names match a pattern without slashes."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def read_bytes(self) -> bytes:
        """Return a file's content.

        Raises ``FileNotFoundError`` if there is no such file in the archive. Raises ``RecordError``
        if the archive is damaged.
        """
        names, path = self._names()
        if path not in names:
            raise FileNotFoundError(2, "No such file in the archive", str(self))
        if self._in_cell:
            return self.archive.cell(self.parts[0])[path]
        return self.archive.read(path)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    @property
    def _in_cell(self) -> bool:
        return bool(self.parts) and self.parts[0] in self.archive.cells

    def _names(self) -> tuple[Collection[str], str]:
        """Return all paths of files, and this path, both within its cell or else the study."""
        if self._in_cell:
            return self.archive.cell(self.parts[0]), "/".join(self.parts[1:])
        return self.archive.files, "/".join(self.parts)

    def _children(self) -> Iterator[str]:
        names, path = self._names()
        prefix = f"{path}/" if path else ""
        inside = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return (name.partition("/")[0] for name in inside)


StudyPath = Path | ArchivePath


def open_study(path: str | Path) -> StudyPath:
    """Return a study's folder, or the root of its archive if ``path`` is a file.

    Raises ``RecordError`` if the file is not a whole, unaltered archive of this format.
    """
    path = Path(path)
    if not path.is_file():
        return path
    return ArchivePath(_open_archive(path), path)


def _open_archive(path: Path) -> StudyArchive:
    try:
        size = path.stat().st_size
        require(
            size <= MAX_ARCHIVE_BYTES,
            f"{path} has {size:,} bytes; an archive must have at most {MAX_ARCHIVE_BYTES:,}",
        )
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    comment = COMMENT.fullmatch(content[-COMMENT_BYTES:])
    if comment is None or not content.startswith(b"PK"):
        raise RecordError(
            f"{path} is not a study archive (python -m labkit.archive DIR STUDY.zip writes one), "
            "or its end is missing"
        )
    digest = hashlib.sha256(content[:-COMMENT_BYTES]).hexdigest()
    require(
        digest == comment["digest"].decode(),
        f"{path} was altered or damaged: its SHA-256 is not the one in its comment",
    )
    try:
        return StudyArchive(path, digest, zipfile.ZipFile(io.BytesIO(content)))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} is not a valid zip file: {error}") from None


def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive into a new folder. The folder appears only when it is complete.

    Raises ``RecordError`` if the archive is not valid, or ``folder`` exists. Raises ``OSError`` if
    a file cannot be written.
    """
    archive = _open_archive(path)
    require(not folder.exists(), f"{folder} exists; choose another folder")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _lock(descriptor)
        _remove_abandoned(folder)
        for name in archive.files:
            _write_below(temporary, name, archive.read(name))
        for cell in archive.cells:
            for name, content in archive.cell(cell).items():
                _write_below(temporary / cell, name, content)
        same = os.path.samestat(os.fstat(descriptor), temporary.stat())
        require(same, f"{folder}: its files were removed while they were written; unpack it again")
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of ``folder`` in which no living process unpacks."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open folder; return False if it is locked, or the file system has no locks.

    Unlike a process's number, a lock is seen from all containers that share the folder.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write_below(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
