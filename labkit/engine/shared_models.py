"""Models that the engines of one process share: read once, and never written again.

What an engine changes lies in its KV memory, its scheduler and its sampler. Between two
steps a model holds nothing but weights, so engines that step one after the other run the
same one, packed weights and all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import Device
from labkit.engine import load_self_test
from labkit.engine.compute_dtype import MatrixStorage
from labkit.engine.load_self_test import ExpectedLogits
from labkit.engine.model_loader import LoadedModel, load
from labkit.engine.packed_forward import ForwardChoice, choose_forward
from labkit.machine import memory_profile

if TYPE_CHECKING:
    from labkit.engine.mlx_lm.mlx_lm_loader import MlxLmModel
    from labkit.engine.parallel.mlx_ring import Ring


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose forward is chosen, and what the self-test expects of it."""

    loaded: LoadedModel
    choice: ForwardChoice
    expected: ExpectedLogits


class SharedModels:
    """The models of engines of which never two step at the same time.

    ``ring``: of every model there is only this rank's share; None: all of it.
    """

    def __init__(self, ring: Ring | None = None) -> None:
        self._ring = ring
        self._chosen: dict[tuple[Any, ...], PreparedModel] = {}
        self._expected: dict[tuple[Any, ...], ExpectedLogits] = {}
        self._mlx_lm: dict[tuple[Path, str | None, MatrixStorage], MlxLmModel] = {}

    def prepare(
        self,
        model_dir: Path,
        block_size: int,
        device: Device,
        *,
        kind: str | None = "float32",
        matrices: MatrixStorage = MatrixStorage.cast,
        layers: int | None = None,
        first_layer: int = 0,
        compiled: bool = False,
    ) -> PreparedModel:
        """Load a model, or return the one that is loaded.

        Parameters
        ----------
        block_size
            Tokens in a block of the self-test's sequences.
        kind, matrices, layers
            See ``model_loader.load``.
        device, first_layer, compiled
            See ``choose_forward``. Compiled blocks count for one engine: they are not shared.
        """
        weights = (model_dir, layers, kind, matrices)
        asked, key = (*weights, block_size), (*weights, device, first_layer)
        ready = self._chosen.get(key)
        if ready is not None and compiled and ready.choice.reason is not None:
            ready = None  # it runs on MLX, where there is something to compile
        needed = ready is None or asked not in self._expected
        fresh = load(*weights) if needed else None
        if fresh is not None and asked not in self._expected:
            self._expected[asked] = load_self_test.compute_expected(fresh, block_size)
        expected = self._expected[asked]
        if ready is not None:
            return PreparedModel(ready.loaded, ready.choice, expected)
        assert fresh is not None
        if self._ring is not None:
            from labkit.engine.parallel.model_sharding import shard

            fresh = shard(fresh, self._ring)
            expected = replace(expected, shapes=load_self_test.kv_shapes(fresh)[0])
            self._expected[asked] = expected
        choice = choose_forward(fresh, device, first_layer, compiled=compiled)
        memory_profile.trim_heap()  # widened weights, and MLX's, of which the forward has copies
        ready = PreparedModel(fresh, choice, expected)
        if choice.forward.blocks is None:
            self._chosen[key] = ready
        return ready

    def load_mlx_lm(
        self, model_dir: Path, kind: str | None, matrices: MatrixStorage = MatrixStorage.cast
    ) -> MlxLmModel:
        """Load a model as mlx_lm does and cast it, or return the one that is loaded."""
        from labkit.engine.mlx_lm.mlx_lm_loader import load as load_plain

        key = (model_dir, kind, matrices)
        if key not in self._mlx_lm:
            self._mlx_lm[key] = load_plain(*key)
        return self._mlx_lm[key]
