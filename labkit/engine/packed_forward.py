"""One forward pass over a packed batch, through the unedited mlx_lm model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import Device
from labkit.engine import compute_dtype
from labkit.engine.batch import Batch
from labkit.engine.compiled_blocks import CompiledBlocks
from labkit.engine.device_logits import DeviceLogits, Logits, WaitLogits
from labkit.engine.engine_protocol import Counters, EngineError, StaleLaunchError
from labkit.engine.layer_cache import ForwardContext, LayerCache
from labkit.engine.model_loader import LoadedModel

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Arrays, Attention
    from labkit.engine.kv_layout.kv_cache_manager import StepAttention
    from labkit.engine.numpy_port.graph_runner import GraphRunner
    from labkit.engine.numpy_port.model_conversion import Conversion


class LogitRowSelector:
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


def select_rows(model: Any) -> LogitRowSelector | None:
    """Wrap the model's last norm; None if it is not where mlx_lm's models have it."""
    for owner in (model, getattr(model, "language_model", None)):
        inner = getattr(owner, "model", None)
        norm = getattr(inner, "norm", None)
        if inner is not None and norm is not None:
            selector = LogitRowSelector(norm)
            inner.norm = selector
            return selector
    return None


class PackedForward:
    """Tokens as batch: ids of shape [T, 1], a position per token, a handle per layer.

    Writes the batch's keys and values into the KV memory on the way.

    On MLX (``name`` is ``mlx``) a step is one lazy graph with one evaluation at its end,
    unless attention takes NumPy's arrays. The model's first layer is layer ``first_layer`` of
    the KV memory. ``blocks``, where there are any, run compiled in steps of decodes alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        arrays: Arrays,
        first_layer: int = 0,
        blocks: CompiledBlocks | None = None,
    ) -> None:
        self.name: Arrays = arrays
        self.blocks = blocks
        self._model = loaded.model
        self._caches = [
            LayerCache(layer, window) for layer, window in enumerate(loaded.windows, first_layer)
        ]
        self._selector = select_rows(loaded.model)
        self._graph_runner: GraphRunner | None = None
        self._sums = loaded.sums

    def __call__(self, batch: Batch, step: StepAttention, counters: Counters) -> Logits:
        """Return the logits after ``batch.logit_rows``: float32 [rows, vocabulary].

        Raises
        ------
        StaleLaunchError
            An attention launch left another's stamp.
        """
        return self.launch(batch, step, counters, ahead=False)()

    def launch(
        self, batch: Batch, step: StepAttention, counters: Counters, *, ahead: bool
    ) -> WaitLogits:
        """Start a step, or run it; ``ahead``: without waiting for the end of what is lazy.

        Counted is ``device_ms``: from here to the end of the wait.
        """
        start = time.perf_counter()
        attention, bridge = step.attention, None
        if attention.arrays not in (self.name, "any"):
            from labkit.engine.attention.array_adapter import ArrayAdapter

            attention = bridge = ArrayAdapter(attention)
        if self.blocks is not None:
            self.blocks.on = not batch.prefill_tokens
        logits = self._replayed(batch, step, counters)
        if logits is None:
            running = ForwardContext(
                step.attention, attention, step.plan, self._array(batch.positions)
            )
            logits = self._logits(batch, running)
        else:
            counters.add("forward.replayed")
        if self.blocks is not None:
            self.blocks.count(counters)
        if self._sums:
            counters.add("ranks.sums", self._sums)
        rows: Logits = logits
        if self.name == "mlx":
            rows = DeviceLogits(logits)
            evaluate([*rows.choices(), *attention.pending(step.plan)], ahead=ahead)
            counters.add("mlx.evaluations")
        if bridge is not None:
            counters.add("mlx.evaluations", bridge.conversions)

        def wait() -> Logits:
            if isinstance(rows, DeviceLogits):
                rows.greedy()
            check_launches(attention, step.plan, counters)
            counters.add("device_ms", (time.perf_counter() - start) * 1e3)
            return rows

        return wait

    @property
    def replay_refusal(self) -> str | None:
        """Why none of its steps is replayed, as far as one asked."""
        return None if self._graph_runner is None else self._graph_runner.reason

    def _replayed(self, batch: Batch, step: StepAttention, counters: Counters) -> Any:
        """Return the logits of a step that is replayed from a tape; None: it is not."""
        if self._graph_runner is None:
            if self.name != "numpy":
                return None
            from labkit.engine.numpy_port.graph_runner import GraphRunner, can_replay

            if not can_replay(step.attention):
                return None
            self._graph_runner = GraphRunner(self._model, self._caches)
        logits = self._graph_runner.run(batch, step.attention, step.plan, counters)
        if logits is None or len(batch.tokens) == len(batch.logit_rows):
            return logits
        return logits[batch.logit_rows]

    def _logits(self, batch: Batch, running: ForwardContext) -> Any:
        """Return the logits [rows, vocabulary], not evaluated where they are MLX's."""
        for cache in self._caches:
            cache.step = running
        if self._selector is not None:
            self._selector.rows = self._array(batch.logit_rows)
        try:
            hidden = self._model(self._array(batch.tokens[:, None]), cache=self._caches)
        finally:
            for cache in self._caches:
                cache.step = None
            if self._selector is not None:
                self._selector.rows = None
        logits = hidden[:, 0]
        if len(logits) != len(batch.logit_rows):
            logits = logits[self._array(batch.logit_rows)]
        if self.name == "numpy" and logits.dtype != np.float32:
            raise EngineError(f"its logits are {logits.dtype}, not float32")
        return logits

    def _array(self, array: Any) -> Any:
        """Return the model's own kind of array."""
        if self.name == "numpy":
            return array
        import mlx.core as mx

        return mx.array(array)


def evaluate(arrays: list[Any], *, ahead: bool) -> None:
    """End a step's graph: compute it, or have it computed while the host goes on."""
    import mlx.core as mx

    if ahead:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
    else:
        mx.eval(arrays)


def check_launches(attention: Attention, plan: Any, counters: Counters) -> None:
    """Count what the layers launched; StaleLaunchError if an output may be another's."""
    for report in attention.report(plan):
        if report.stale:
            raise StaleLaunchError(
                f"layer {report.layer}: the launch left another's stamp: {report}"
            )
        counters.add_all(report.counters())


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """Which forward a model runs, decided once at load, and why where it is MLX's.

    ``weights``: bytes by what they are held in, as counters have it; on NumPy arrays those of
    matrices alone.
    """

    forward: PackedForward
    reason: str | None
    weights: Mapping[str, int]


def choose_forward(
    loaded: LoadedModel, device: Device, first_layer: int = 0, *, compiled: bool = False
) -> ForwardChoice:
    """Run the model on NumPy arrays and labkit's kernels where its code allows it, else on MLX.

    Where attention runs on Metal, so does the rest. On MLX its feed-forward blocks are
    ``compiled`` for steps of decodes alone, if asked to; on NumPy arrays there is nothing to
    compile. The model's parts are replaced in place: ask plain mlx_lm what you want to know
    before.
    """
    found = _on_numpy(loaded, device)
    if found.ok:
        return ForwardChoice(PackedForward(loaded, "numpy", first_layer), None, found.weights)
    if loaded.matrices is compute_dtype.MatrixStorage.as_stored:
        compute_dtype.cast_parameters(loaded.model, "float32")
    blocks = CompiledBlocks(loaded.model) if compiled else None
    forward = PackedForward(loaded, "mlx", first_layer, blocks)
    return ForwardChoice(forward, found.reason, compute_dtype.weight_bytes_by_dtype(loaded.model))


def _on_numpy(loaded: LoadedModel, device: Device) -> Conversion:
    """Convert the model to NumPy's arrays, or say why it stays on MLX."""
    from labkit.engine.numpy_port.model_conversion import Conversion, convert

    if device is not Device.cpu:
        where = f"engine.attention.device={device.value}"
        return Conversion(f"{where}: the model runs where its attention does")
    return convert(loaded.model, stored=loaded.matrices is compute_dtype.MatrixStorage.as_stored)
