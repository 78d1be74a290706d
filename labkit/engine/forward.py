"""One forward pass over a packed batch, through the unedited mlx_lm model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.config import Device
from labkit.engine.base import EngineError
from labkit.engine.compiled import CompiledBlocks
from labkit.engine.input_builder import Batch
from labkit.engine.layer_cache import ArrayBridge, LayerCache, Step
from labkit.engine.model_loader import LoadedModel
from labkit.engine.stats import Counters

if TYPE_CHECKING:
    from labkit.engine.kv_layout.base import StepAttention

Logits = NDArray[np.float32]


class Forward(Protocol):
    """Computes logits; writes the batch's keys and values into the KV memory on the way."""

    name: str

    def __call__(self, batch: Batch, attention: StepAttention, counters: Counters) -> Logits:
        """Return the logits after ``batch.logit_rows``: float32 [rows, vocabulary], writable."""


class SelectRows:
    """A model's last norm, applied only to the rows whose logits are wanted.

    Stands in the model where the norm stood; ``rows`` is set before each forward (None:
    all rows). Rows of a norm do not depend on each other.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self.rows: Any = None

    def __call__(self, hidden: Any) -> Any:
        """Normalise ``hidden`` [T, 1, dim]."""
        return self.norm(hidden if self.rows is None else hidden[self.rows])


def select_rows(model: Any) -> SelectRows | None:
    """Wrap the model's last norm; None if it is not where mlx_lm's models have it."""
    for owner in (model, getattr(model, "language_model", None)):
        inner = getattr(owner, "model", None)
        norm = getattr(inner, "norm", None)
        if inner is not None and norm is not None:
            selector = SelectRows(norm)
            inner.norm = selector
            return selector
    return None


class PackedForward:
    """Tokens as batch: ids of shape [T, 1], a position per token, a handle per layer.

    The model's first layer is layer ``first_layer`` of the KV memory. ``blocks``, where
    there are any, run compiled in steps of decodes alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        bridge: ArrayBridge,
        name: str,
        first_layer: int = 0,
        blocks: CompiledBlocks | None = None,
    ) -> None:
        self.name = name
        self.blocks = blocks
        self._model = loaded.model
        self._bridge = bridge
        self._caches = [
            LayerCache(layer, window, bridge)
            for layer, window in enumerate(loaded.windows, first_layer)
        ]
        self._selector = select_rows(loaded.model)

    def __call__(self, batch: Batch, attention: StepAttention, counters: Counters) -> Logits:
        """Run the model once; see ``Forward``."""
        step = Step(attention, counters, self._bridge.from_numpy(batch.positions))
        for cache in self._caches:
            cache.step = step
        if self._selector is not None:
            self._selector.rows = self._bridge.from_numpy(batch.logit_rows)
        if self.blocks is not None:
            self.blocks.on = not batch.prefill_tokens
        try:
            hidden = self._model(self._bridge.from_numpy(batch.tokens[:, None]), cache=self._caches)
        finally:
            for cache in self._caches:
                cache.step = None
            if self._selector is not None:
                self._selector.rows = None
        if self.blocks is not None:
            self.blocks.count(counters)
        (logits,) = self._bridge.to_numpy(hidden)
        logits = logits[:, 0]
        if len(logits) != len(batch.logit_rows):
            logits = logits[batch.logit_rows]
        if logits.dtype != np.float32:
            raise EngineError(f"its logits are {logits.dtype}, not float32")
        return logits


class MlxBridge:
    """Between MLX arrays and NumPy: views of float32 one way, a copy the other."""

    def to_numpy(self, *arrays: Any) -> tuple[NDArray[Any], ...]:
        """Evaluate all arrays together, in float32, and return views."""
        import mlx.core as mx

        single = [array.astype(mx.float32) for array in arrays]
        mx.eval(*single)
        return tuple(np.asarray(array) for array in single)

    def from_numpy(self, array: NDArray[Any], like: Any = None) -> Any:
        """Return a copy as an MLX array; ``like``: cast to this array's type."""
        import mlx.core as mx

        copy = mx.array(array)
        return copy if like is None else copy.astype(like.dtype)


class NumpyBridge:
    """NumPy on both sides: nothing to move."""

    def to_numpy(self, *arrays: Any) -> tuple[NDArray[Any], ...]:
        """Return the arrays as they are."""
        return arrays

    def from_numpy(self, array: NDArray[Any], like: Any = None) -> Any:
        """Return the array as it is."""
        return array


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """Which forward a model runs, decided once at load, and why where it is MLX's."""

    forward: PackedForward
    reason: str | None


def choose_forward(
    loaded: LoadedModel, device: Device, first_layer: int = 0, *, compiled: bool = False
) -> ForwardChoice:
    """Run the model on NumPy arrays with numba leaves where its code allows it, else on MLX.

    Where attention runs on Metal, so does the rest. On MLX its feed-forward blocks are
    ``compiled`` for steps of decodes alone, if asked to; on NumPy arrays there is nothing to
    compile. The model's parts are replaced in place: ask plain mlx_lm what you want to know
    before.
    """
    reason = _reason_for_mlx(loaded, device)
    if reason is None:
        return ForwardChoice(PackedForward(loaded, NumpyBridge(), "numpy", first_layer), None)
    blocks = CompiledBlocks(loaded.model) if compiled else None
    return ForwardChoice(PackedForward(loaded, MlxBridge(), "mlx", first_layer, blocks), reason)


def _reason_for_mlx(loaded: LoadedModel, device: Device) -> str | None:
    """Swap the model's leaves for NumPy's, or say why it stays on MLX."""
    from labkit.engine.cpu import swap_leaves

    if device is Device.metal:
        return "engine.attention.device=metal: the model runs where its attention does"
    return swap_leaves(loaded.model).reason
