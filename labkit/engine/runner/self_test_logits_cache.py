"""The expected logits of large models, kept in the user's cache for later processes.

Computing them is a third of the time in which a model of 100 MB loads from warm caches.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from labkit.engine.runner.logits_self_test import (
    Logits,
    Sequences,
    compute_expected,
    file_states,
)
from labkit.machine import cache_dir, numba_sources
from labkit.machine.file_digest import SETTLED_S, file_state

MIN_STORED_BYTES = 1 << 25  # a smaller model's logits are computed faster than this file is read
LOADED_LATER = "engine/model/dequantized_layers.py"  # imported only for quantised models
_PACKAGE = Path(__file__).resolve().parents[2]


def get(
    model_dir: Path,
    model: Any,
    loading: tuple[Any, ...],
    sequences: Sequences,
    compute: Callable[[], Logits],
) -> Logits:
    """Return the stored logits of a model, or call ``compute`` and store them.

    ``model`` is mlx_lm's model, ``loading`` what the logits depend on besides its files. They are
    computed again after a change of the model's files, of mlx_lm's folder of model classes (which
    import each other), of MLX or mlx_lm, or of the code that computes them.
    """
    states = file_states(model_dir)
    if sum(state.size for _, state in states) < MIN_STORED_BYTES:
        return compute()
    source = inspect.getsourcefile(type(model))
    classes = sorted(Path(source).parent.glob("*.py")) if source else []
    code = [Path(inspect.getfile(compute_expected)).resolve(), _PACKAGE / LOADED_LATER]
    key = (
        states,
        loading,
        source,
        [(file.name, file_state(file)) for file in classes],
        [metadata.version(package) for package in ("mlx", "mlx-lm", "numpy")],
        [numba_sources.digest(file, _PACKAGE) for file in code],
    )
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    entry = cache_dir.root() / "expected" / name
    ends = np.cumsum([len(ids) for ids in sequences])
    try:
        rows = np.load(entry, allow_pickle=False)
        if len(rows) == ends[-1]:
            return tuple(np.split(rows, ends[:-1]))
    except (OSError, EOFError, ValueError):
        pass  # not stored, or a damaged entry
    logits = compute()
    newest = max(state.changed_ns for _, state in states) / 1e9
    if file_states(model_dir) == states and time.time() - newest > SETTLED_S:
        stream = io.BytesIO()
        np.save(stream, np.concatenate(logits), allow_pickle=False)
        cache_dir.write_file(entry, stream.getvalue())
    return logits
