"""Digests of a cell's records, arms and design, which show later edits.

``SHA256SUMS`` in a cell's folder has the SHA-256 of every record and arm and of ``design.json``,
the part of ``cell.json`` that is fixed before the first run. It has the format that
``sha256sum -c`` reads. The runner lists a file just before it publishes the file, and no other
program changes the list. A reader refuses a file whose digest is not the listed one. Studies by
older versions of labkit have no list, so edits of their files cannot be noticed; reports say so.

The list is not a signature: somebody who edits a record can also edit the list. To rule that out,
publish the digest of the study's archive (:mod:`labkit.records.study_archive`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from labkit.records.atomic_write import write_synced
from labkit.records.run_record import RecordError
from labkit.records.study_archive import StudyPath

DIGESTS_FILE = "SHA256SUMS"
LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>\S.*)")


def read_digests(cell_dir: StudyPath) -> dict[str, str]:
    """Return the listed SHA-256 digests by path within the cell's folder.

    The map is empty if the cell has no list. Raises ``RecordError`` if the list cannot be read, or
    one of its lines is not ``DIGEST  PATH``.
    """
    path = cell_dir / DIGESTS_FILE
    if not path.is_file():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    matches = [LINE.fullmatch(line) for line in lines]
    for number, match in enumerate(matches, 1):
        if match is None:
            raise RecordError(f"{path}, line {number}: must be a SHA-256 and a path")
    return {match["name"]: match["digest"] for match in matches if match is not None}


def list_digests(cell_dir: Path, contents: Mapping[Path, bytes]) -> None:
    """Put the digests of files' contents into the cell's list.

    They replace earlier digests of these files. The caller writes the files afterwards, and must
    hold the cell's lock, because two processes must not change the list at the same time.
    """
    digests = read_digests(cell_dir)
    for path, content in contents.items():
        digests[path.relative_to(cell_dir).as_posix()] = hashlib.sha256(content).hexdigest()
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write_synced(cell_dir / DIGESTS_FILE, text.encode())


def check_digest(path: StudyPath, content: bytes, digest: str | None) -> None:
    """Check a file's content against its listed digest, if there is one.

    Raises ``RecordError`` if the file was edited. The message says how to repair the study.
    """
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        again = ", or run the study's command again" if path.parent.name == "runs" else ""
        raise RecordError(
            f"{path} was edited after it was written (its SHA-256 is not the one in "
            f"{DIGESTS_FILE}); restore it from a copy{again}"
        )
