"""Array outputs that differ between runs, stored so that a report can quantify the difference.

Each run of the first block stores each distinct output once, in a file named by its digest. When
the block is done, the outputs that all its runs agree on are deleted, so equal arms leave no
files. Later blocks store nothing: if outputs differ only there, only their digests are known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.records import Record, output_values_path
from labkit.records.atomic_write import atomic_write

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = Mapping[str, NDArray[np.float32]]

BLOCK = 0  # the only block whose outputs are stored
MAX_BYTES = 128 << 20  # per run; outputs beyond this are not stored


def save(cell_dir: Path, values: Values) -> None:
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
    differing = set(_differing_digests([r for r in records if r.block == BLOCK and r.ok]))
    for path in folder.iterdir():
        if path.stem not in differing:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _differing_digests(records: Sequence[Record]) -> Iterable[str]:
    """Yield the digests of the cases whose runs do not all agree."""
    digests_by_case: dict[str, set[str]] = {}
    for record in records:
        for case in record.cases:
            if case.outputs is not None and case.outputs["kind"] == "array":
                digests = digests_by_case.setdefault(case.case, set())
                digests.add(str(case.outputs["digest"]))
    for digests in digests_by_case.values():
        if len(digests) > 1:
            yield from digests
