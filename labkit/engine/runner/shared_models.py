"""Models that the engines of one process share: loaded once, never changed afterwards.

An engine's state is in its KV memory, its scheduler and its sampler. Between two steps a model has
no state but its weights, so engines that never step at the same time can share the model, packed
weights included.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import Activations, Device
from labkit.engine.engine_protocol import EngineError
from labkit.engine.model.cache_shapes import cache_shapes
from labkit.engine.model.dtype_resolution import FLOAT32, WeightLoading
from labkit.engine.model.model_loader import LoadedModel, load_model
from labkit.engine.runner import logits_self_test
from labkit.engine.runner.logits_self_test import ExpectedLogits, Logits, Sequences, file_states
from labkit.engine.runner.packed_forward import PackedForward, choose_forward
from labkit.machine import cache_entries, source_dependency_digest
from labkit.machine.facts import memory_capacity
from labkit.machine.file_digest import SETTLED_S, file_state

if TYPE_CHECKING:
    from labkit.engine.model.unpatched_loader import MlxLmModel
    from labkit.engine.parallel.mlx_ring import Ring

MIN_STORED_BYTES = 1 << 25  # a smaller model's logits are computed faster than this file is read
LOADED_LATER = "engine/model/dequantized_layers.py"  # imported only for quantised models
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A loaded model, its forward, and the logits that the self-test expects."""

    loaded: LoadedModel
    forward: PackedForward
    expected: ExpectedLogits


class SharedModels:
    """Loads models, and shares them among engines that never step at the same time.

    With a ``ring``, only this rank's shard of each model is loaded (None: the whole model).
    """

    def __init__(self, ring: Ring | None = None) -> None:
        self._ring = ring
        self._prepared: dict[tuple[Any, ...], PreparedModel] = {}
        self._expected: dict[tuple[Any, ...], ExpectedLogits] = {}
        self._mlx_lm: dict[tuple[Path, WeightLoading], MlxLmModel] = {}

    def prepare(
        self,
        model_dir: Path,
        block_size: int,
        device: Device,
        *,
        loading: WeightLoading = FLOAT32,
        first_layer: int = 0,
        compiled: bool = False,
        activations: Activations = Activations.float32,
        wait_for_kernels: Callable[[], None] = lambda: None,
    ) -> PreparedModel:
        """Load a model and choose its forward, or return the model that is loaded already.

        ``block_size``: tokens per KV block, for the self-test's sequences. ``device``,
        ``first_layer``, ``compiled``, ``activations``: see ``choose_forward``.
        ``wait_for_kernels`` is called before that. A model with compiled blocks is not shared,
        because the blocks count their calls for one engine.
        """
        import mlx.core as mx

        weights = model_dir, loading
        expected_key, key = (*weights, block_size), (*weights, device, first_layer, activations)
        prepared = self._prepared.get(key)
        if prepared is not None and compiled and prepared.forward.name == "mlx":
            prepared = None  # the model runs on MLX, where blocks can be compiled
        must_load = prepared is None or expected_key not in self._expected
        fresh = load_model(*weights) if must_load else None
        if fresh is not None and expected_key not in self._expected:
            stored = functools.partial(stored_logits, model_dir, fresh.model, expected_key)
            compute = functools.partial(
                logits_self_test.compute_expected, fresh, block_size, stored
            )
            self._expected[expected_key] = logits_self_test.EXPECTED_LOGITS.get(
                model_dir, expected_key, compute
            )
        expected = self._expected[expected_key]
        wait_for_kernels()
        if prepared is not None:
            return PreparedModel(prepared.loaded, prepared.forward, expected)
        assert fresh is not None
        if self._ring is not None:
            from labkit.engine.parallel.model_sharding import shard

            if expected.cached.states:
                raise EngineError(
                    f"engine.parallel.size={self._ring.size}: model_type={fresh.model_type} has "
                    "recurrent states, which are not divided among ranks; set "
                    "engine.parallel.size=1"
                )
            fresh = shard(fresh, self._ring)
            expected = replace(expected, cached=cache_shapes(fresh))
            self._expected[expected_key] = expected
        forward = choose_forward(
            fresh,
            device,
            first_layer,
            compiled=compiled,
            activations=activations,
            mixers=expected.cached.mixers,
        )
        # Free dequantised weights, and MLX weights that were copied, which MLX keeps for reuse.
        mx.clear_cache()
        memory_capacity.trim_heap()
        prepared = PreparedModel(fresh, forward, expected)
        if forward.blocks is None:
            self._prepared[key] = prepared
        return prepared

    def load_mlx_lm(self, model_dir: Path, loading: WeightLoading) -> MlxLmModel:
        """Load a model with mlx_lm's loader and cast it, or return it if it is loaded already."""
        from labkit.engine.model.unpatched_loader import load as load_plain

        key = model_dir, loading
        if key not in self._mlx_lm:
            self._mlx_lm[key] = load_plain(*key)
        return self._mlx_lm[key]


def stored_logits(
    model_dir: Path,
    model: Any,
    loading: tuple[Any, ...],
    sequences: Sequences,
    compute: Callable[[], Logits],
) -> Logits:
    """Return the expected logits that the user's cache has, or call ``compute`` and store them.

    Computing them takes a third of the time in which a model of 100 MB loads from warm caches.
    ``model`` is mlx_lm's model, ``loading`` what the logits depend on besides its files. They are
    computed again after a change of the model's files, of mlx_lm's folder of model classes (which
    import each other), of MLX or mlx_lm, or of the code that computes them.
    """
    states = file_states(model_dir)
    if sum(state.size for _, state in states) < MIN_STORED_BYTES:
        return compute()
    source = inspect.getsourcefile(type(model))
    classes = sorted(Path(source).parent.glob("*.py")) if source else []
    code = [Path(inspect.getfile(logits_self_test)).resolve(), _PACKAGE / LOADED_LATER]
    key = (
        states,
        loading,
        source,
        [(file.name, file_state(file)) for file in classes],
        [metadata.version(package) for package in ("mlx", "mlx-lm", "numpy")],
        [source_dependency_digest.digest(file, _PACKAGE) for file in code],
    )
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    entry = cache_entries.root() / "expected" / name
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
        cache_entries.write_file(entry, stream.getvalue())
    return logits
