"""Models that the engines of one process share: loaded once, never changed afterwards.

An engine's state is in its KV memory, its scheduler and its sampler. Between two steps a model has
no state but its weights, so engines that never step at the same time can share the model, packed
weights included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import Activations, Device
from labkit.engine.engine_protocol import EngineError
from labkit.engine.model.cache_shapes import cache_shapes
from labkit.engine.model.compute_dtype import MatrixStorage
from labkit.engine.model.model_loader import LoadedModel, load_model
from labkit.engine.runner import logits_self_test, self_test_logits_cache
from labkit.engine.runner.logits_self_test import ExpectedLogits
from labkit.engine.runner.packed_forward import ForwardChoice, choose_forward
from labkit.machine.facts import memory_capacity

if TYPE_CHECKING:
    from labkit.engine.model.unpatched_loader import MlxLmModel
    from labkit.engine.parallel.mlx_ring import Ring


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A loaded model, its forward, and the logits that the self-test expects."""

    loaded: LoadedModel
    choice: ForwardChoice
    expected: ExpectedLogits


class SharedModels:
    """Loads models, and shares them among engines that never step at the same time.

    With a ``ring``, only this rank's shard of each model is loaded (None: the whole model).
    """

    def __init__(self, ring: Ring | None = None) -> None:
        self._ring = ring
        self._prepared: dict[tuple[Any, ...], PreparedModel] = {}
        self._expected: dict[tuple[Any, ...], ExpectedLogits] = {}
        self._mlx_lm: dict[tuple[Path, str | None, MatrixStorage], MlxLmModel] = {}

    def prepare(
        self,
        model_dir: Path,
        block_size: int,
        device: Device,
        *,
        dtype: str | None = "float32",
        matrix_storage: MatrixStorage = MatrixStorage.cast,
        layers: int | None = None,
        first_layer: int = 0,
        compiled: bool = False,
        activations: Activations = Activations.float32,
        wait_for_kernels: Callable[[], None] = lambda: None,
    ) -> PreparedModel:
        """Load a model and choose its forward, or return the model that is loaded already.

        ``block_size``: tokens per KV block, for the self-test's sequences. ``dtype``,
        ``matrix_storage``, ``layers``: see ``model_loader.load_model``. ``device``,
        ``first_layer``, ``compiled``, ``activations``: see ``choose_forward``.
        ``wait_for_kernels`` is called before that. A model with compiled blocks is not shared,
        because the blocks count their calls for one engine.
        """
        import mlx.core as mx

        weights = (model_dir, layers, dtype, matrix_storage)
        expected_key, key = (*weights, block_size), (*weights, device, first_layer, activations)
        prepared = self._prepared.get(key)
        if prepared is not None and compiled and prepared.choice.reason is not None:
            prepared = None  # the model runs on MLX, where blocks can be compiled
        must_load = prepared is None or expected_key not in self._expected
        fresh = load_model(*weights) if must_load else None
        if fresh is not None and expected_key not in self._expected:
            stored = functools.partial(
                self_test_logits_cache.get, model_dir, fresh.model, expected_key
            )
            compute = functools.partial(
                logits_self_test.compute_expected, fresh, block_size, stored
            )
            self._expected[expected_key] = logits_self_test.EXPECTED_LOGITS.get(
                model_dir, expected_key, compute
            )
        expected = self._expected[expected_key]
        wait_for_kernels()
        if prepared is not None:
            return PreparedModel(prepared.loaded, prepared.choice, expected)
        assert fresh is not None
        if self._ring is not None:
            from labkit.engine.parallel.model_sharding import shard

            if expected.states:
                raise EngineError(
                    f"engine.parallel.size={self._ring.size}: model_type={fresh.model_type} has "
                    "recurrent states, which are not divided among ranks; set "
                    "engine.parallel.size=1"
                )
            fresh = shard(fresh, self._ring)
            expected = replace(expected, shapes=cache_shapes(fresh).attention)
            self._expected[expected_key] = expected
        choice = choose_forward(
            fresh,
            device,
            first_layer,
            compiled=compiled,
            activations=activations,
            mixers=expected.mixers,
        )
        # Free dequantised weights, and MLX weights that were copied, which MLX keeps for reuse.
        mx.clear_cache()
        memory_capacity.trim_heap()
        prepared = PreparedModel(fresh, choice, expected)
        if choice.forward.blocks is None:
            self._prepared[key] = prepared
        return prepared

    def load_mlx_lm(
        self, model_dir: Path, dtype: str | None, matrix_storage: MatrixStorage = MatrixStorage.cast
    ) -> MlxLmModel:
        """Load a model with mlx_lm's loader and cast it, or return it if it is loaded already."""
        from labkit.engine.model.unpatched_loader import load as load_plain

        key = (model_dir, dtype, matrix_storage)
        if key not in self._mlx_lm:
            self._mlx_lm[key] = load_plain(*key)
        return self._mlx_lm[key]
