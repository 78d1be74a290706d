"""Array outputs that differ between runs, stored so that a report can quantify the difference.

Each run of the first block stores each distinct output once, in a file named by its digest. When
the block is done, the outputs that all its runs agree on are deleted, so equal arms leave no
files. Later blocks store nothing: if outputs differ only there, only their digests are known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.records import Record, output_values_path
from labkit.records.atomic_write import atomic_write

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 0  # the only block whose outputs are stored
MAX_BYTES = 128 << 20  # per run; outputs beyond this are not stored


def save(cell_dir: Path, values: Mapping[str, NDArray[np.float32]]) -> None:
    """Store each array that has no file yet, by rename: arrays by digest, in the order of cases.

    If a file cannot be written, print one line and store no more.
    """
    import numpy as np

    bytes_left = MAX_BYTES
    for digest, array in values.items():
        path, bytes_left = output_values_path(cell_dir, digest), bytes_left - array.nbytes
        if bytes_left < 0 or path.exists():
            continue
        try:
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.save(file, array, allow_pickle=False)
        except OSError as error:
            print(f"{path}: {error.strerror or error}; the values are not stored", file=sys.stderr)
            return


def drop_equal(cell_dir: Path, records: Iterable[Record]) -> None:
    """Delete the stored outputs on which all runs of the first block agree."""
    folder = output_values_path(cell_dir, "any").parent
    if not folder.is_dir():
        return
    digests: dict[str, set[str]] = {}  # by case, of the outputs of all runs
    for record in records:
        for case in record.cases if record.block == BLOCK and record.ok else ():
            if case.outputs is not None and case.outputs["kind"] == "array":
                digests.setdefault(case.case, set()).add(str(case.outputs["digest"]))
    differing = set[str]().union(*(found for found in digests.values() if len(found) > 1))
    for path in folder.iterdir():
        if path.stem not in differing:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
