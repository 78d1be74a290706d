"""Write files so that a reader sees either the old or the new content, never a mixture."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file beside ``path``; rename it to ``path`` when the block succeeds.

    After an exception ``path`` is as it was and the temporary file is removed. Neither a link at
    ``path`` nor one at the temporary path is followed. An ``OSError`` names ``path``.
    """
    # Processes in several containers that share the folder may have equal numbers.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # writing to an open file names none
        raise


def write_synced(path: Path, content: bytes) -> None:
    """Write a temporary file beside ``path``, sync it and rename it to ``path``.

    Raises ``OSError``; ``path`` is then unchanged.
    """
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
