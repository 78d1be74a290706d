"""The values of array outputs that differ, so that a report can say by how much.

Runs of the first block write each distinct output once, named by its digest; when the
block is done, what all its runs agree on is dropped. Identical arms so leave nothing, and
later blocks write nothing: what differs there alone is known by checksums only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.records import Record, output_values_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = Mapping[str, NDArray[np.float32]]

BLOCK = 0  # the one block whose values are kept
MOST_BYTES = 128 << 20  # per run; the cases beyond are not kept


def save(cell_dir: Path, values: Values) -> None:
    """Write each array that is not there yet, by rename; a full disk only leaves a line.

    Parameters
    ----------
    values
        Arrays by digest, in the order of the cases.
    """
    import numpy as np

    room = MOST_BYTES
    for digest, array in values.items():
        path, room = output_values_path(cell_dir, digest), room - array.nbytes
        if room < 0 or path.exists():
            continue
        draft = path.with_name(f".{digest}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(draft, "wb") as file:
                np.save(file, array, allow_pickle=False)
            draft.replace(path)
        except OSError as error:
            print(f"{path}: {error.strerror or error}; the values are not kept", file=sys.stderr)
            draft.unlink(missing_ok=True)
            return


def settle(cell_dir: Path, records: Iterable[Record]) -> None:
    """Drop what the first block's runs agree on; may be done again at any time."""
    folder = output_values_path(cell_dir, "any").parent
    if not folder.is_dir():
        return
    needed = set(_differing([r for r in records if r.block == BLOCK and r.ok]))
    for path in folder.iterdir():
        if path.stem not in needed:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _differing(records: Sequence[Record]) -> Iterable[str]:
    """Return the digests of the cases whose runs do not all agree."""
    digests: dict[str, set[str]] = {}
    for record in records:
        for case in record.cases:
            if case.outputs is not None and case.outputs["kind"] == "array":
                digests.setdefault(case.case, set()).add(str(case.outputs["digest"]))
    for found in digests.values():
        if len(found) > 1:
            yield from found
