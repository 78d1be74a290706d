"""One forward pass of an unedited mlx_lm model over a packed batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import Activations, Device
from labkit.cpu.runtime.forward_clock import FORWARD_CLOCK
from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters, EngineError, StaleLaunchError
from labkit.engine.model import dtype_resolution
from labkit.engine.model.cache_shapes import MixerSpec
from labkit.engine.model.layer_cache import ForwardContext, ModelCaches
from labkit.engine.model.model_loader import LoadedModel
from labkit.engine.runner.compiled_feed_forward import CompiledBlocks
from labkit.engine.sampling.step_logits import DeviceLogits, Logits, WaitLogits

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Arrays, Attention
    from labkit.engine.kv_cache_interface import StepAttention
    from labkit.engine.numpy_port.kernel_graph_replay import GraphRunner
    from labkit.engine.numpy_port.model_conversion import Conversion


class LogitRowSelector:
    """A replacement for a model's last norm that normalises only the rows whose logits are needed.

    ``rows`` is set before each forward (None: all rows). A norm treats its rows independently, so
    the logits of these rows do not change.
    """

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self.rows: Any = None

    def __call__(self, hidden: Any) -> Any:
        """Return the selected rows of ``hidden`` [T, 1, dim], normalised: [rows, 1, dim]."""
        return self.norm(hidden if self.rows is None else hidden[self.rows])


def select_rows(model: Any) -> LogitRowSelector | None:
    """Replace the model's last norm by a selector. Return None if the model has no such norm."""
    for owner in (model, getattr(model, "language_model", None)):
        inner = getattr(owner, "model", None)
        norm = getattr(inner, "norm", None)
        if inner is not None and norm is not None:
            selector = LogitRowSelector(norm)
            inner.norm = selector
            return selector
    return None


class PackedForward:
    """Runs the model with every token as a batch entry: ids [T, 1] and a position per token.

    The attention of each layer writes the batch's keys and values to the KV memory. On MLX
    arrays a step is one lazy graph with one evaluation at its end, unless the attention takes
    NumPy arrays.

    ``loaded``: the model. ``conversion``: whether it runs on NumPy arrays or on MLX's, which is the
    forward's ``name``. ``first_layer``: the index in the KV memory of the model's first layer.
    ``blocks``: the model's feed-forward blocks, if they run compiled in steps of pure decodes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        conversion: Conversion,
        first_layer: int = 0,
        blocks: CompiledBlocks | None = None,
    ) -> None:
        self.name: Arrays = "numpy" if conversion.ok else "mlx"
        self.conversion = conversion
        self.blocks = blocks
        self._model = loaded.model
        self._caches = ModelCaches(loaded.caches, first_layer)
        self._selector = select_rows(loaded.model)
        self._graph_runner: GraphRunner | None = None
        self._num_all_reduces = loaded.num_all_reduces

    def __call__(self, batch: Batch, step: StepAttention, counters: Counters) -> Logits:
        """Run a step and return the logits of ``batch.logit_rows``: float32 [rows, vocabulary].

        Raises ``StaleLaunchError`` if an attention kernel wrote the stamp of another launch.
        """
        return self.launch(batch, step, counters, ahead=False)()

    def launch(
        self,
        batch: Batch,
        step: StepAttention,
        counters: Counters,
        *,
        ahead: bool,
        replay: bool = True,
    ) -> WaitLogits:
        """Launch a step and return a function that waits for its logits and returns them.

        With ``ahead`` a lazy graph is computed asynchronously; with ``replay`` a step is replayed
        from a captured graph if it can be. The counter ``device_ms`` is the time from the call of
        ``launch`` to the end of the wait.
        """
        start = time.perf_counter()
        attention, adapter = step.attention, None
        if attention.arrays not in (self.name, "any"):
            from labkit.engine.attention.attention_protocol import ArrayAdapter

            attention = adapter = ArrayAdapter(attention)
        if self.blocks is not None:
            self.blocks.enabled = not batch.prefill_tokens
        logits = self._replay(batch, step, counters) if replay else None
        if logits is None:
            counters.add("forward.eager")
            positions = self._array(batch.positions)
            timed = _timed(attention) if self.name == "numpy" else attention
            context = ForwardContext(step.attention, timed, step.metadata, positions, step.states)
            logits = self._run_model(batch, context)
        else:
            counters.add("forward.replayed")
        if self.blocks is not None:
            self.blocks.count(counters)
        if self._num_all_reduces:
            counters.add("ranks.sums", self._num_all_reduces)
        rows: Logits = logits
        if self.name == "mlx":
            rows = DeviceLogits(logits)
            states = step.states.pending() if step.states is not None else ()
            evaluate([*rows.choices(), *attention.pending(step.metadata), *states], ahead=ahead)
            counters.add("mlx.evaluations")
        if adapter is not None:
            counters.add("mlx.evaluations", adapter.conversions)

        metadata = step.metadata  # alone: ``wait`` must not keep the step's states alive

        def wait() -> Logits:
            if isinstance(rows, DeviceLogits):
                rows.greedy()
            count_launches(attention, metadata, counters)
            counters.add("device_ms", (time.perf_counter() - start) * 1e3)
            return rows

        return wait

    def replay_refusal(self, attention: Attention) -> str | None:
        """Return the reason why no step over ``attention`` is replayed from a captured graph.

        Returns None if steps are replayed. Whether the model can be captured is known after the
        first step.
        """
        if self.name == "mlx":
            return "the model runs on MLX"
        from labkit.engine.numpy_port.kernel_graph_replay import replay_obstacle

        obstacle = replay_obstacle(attention)
        if obstacle is None and self._graph_runner is not None:
            return self._graph_runner.reason
        return obstacle

    def _replay(self, batch: Batch, step: StepAttention, counters: Counters) -> Any:
        """Replay the captured graph. Return the logits, or None if the step cannot be replayed."""
        if self._graph_runner is None:
            if self.replay_refusal(step.attention) is not None:
                return None
            from labkit.engine.numpy_port.kernel_graph_replay import GraphRunner

            self._graph_runner = GraphRunner(self._model, self._caches)
        logits = self._graph_runner.run(batch, step.attention, step.metadata, counters)
        if logits is None or len(batch.tokens) == len(batch.logit_rows):
            return logits
        return logits[batch.logit_rows]

    def _run_model(self, batch: Batch, context: ForwardContext) -> Any:
        if self._selector is not None:
            self._selector.rows = self._array(batch.logit_rows)
        try:
            with self._caches.use(context):
                hidden = self._model(self._array(batch.tokens[:, None]), cache=self._caches.layers)
        finally:
            if self._selector is not None:
                self._selector.rows = None
        logits = hidden[:, 0]
        if self._selector is None or len(logits) != len(batch.logit_rows):
            logits = logits[self._array(batch.logit_rows)]
        if self.name == "numpy" and logits.dtype != np.float32:
            raise EngineError(f"the model's logits are {logits.dtype}, not float32")
        return logits

    def _array(self, array: Any) -> Any:
        if self.name == "numpy":
            return array
        import mlx.core as mx

        return mx.array(array)


def _timed(attention: Attention) -> Any:
    """Return the attention, or one that adds its times to this context's forward clock."""
    clock = FORWARD_CLOCK.get()
    if clock is None:
        return attention

    def forward(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = attention.forward(*arguments, **options)
        clock.attention += time.perf_counter() - start
        return out

    return SimpleNamespace(bind=attention.bind, forward=forward)


def evaluate(arrays: list[Any], *, ahead: bool) -> None:
    """Compute a step's graph. With ``ahead``, return before it is computed."""
    import mlx.core as mx

    if ahead:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
    else:
        mx.eval(arrays)


def count_launches(attention: Attention, metadata: Any, counters: Counters) -> None:
    """Count the layers' launches. Raises ``StaleLaunchError`` if a stamp is another launch's."""
    for report in attention.report(metadata):
        if report.stale:
            raise StaleLaunchError(
                f"layer {report.layer}: the launch left the stamp of another launch, so its output "
                f"may be stale: {report}"
            )
        counters.add_all(report.counters())


def choose_forward(
    loaded: LoadedModel,
    device: Device,
    first_layer: int = 0,
    *,
    compiled: bool = False,
    activations: Activations = Activations.float32,
    mixers: Sequence[MixerSpec] = (),
) -> PackedForward:
    """Return a forward on NumPy arrays and labkit's kernels if the model allows it, else on MLX.

    If the attention does not run on device ``cpu``, or if ``mixers`` use recurrent states, the
    model runs on MLX. With ``compiled``, a model on MLX runs its feed-forward blocks compiled in
    steps of pure decodes. Parts of the model are replaced in place, so the self-test's expected
    logits must be computed first. Raises ``EngineError`` if ``activations`` is ``int8``, and no
    weights of the model can be multiplied by int8.
    """
    conversion = _convert_to_numpy(loaded, device, activations, mixers)
    if activations is Activations.int8:
        _require_int8(loaded, conversion)
    if conversion.ok:
        return PackedForward(loaded, conversion, first_layer)
    if loaded.matrix_storage is dtype_resolution.MatrixStorage.as_stored:
        dtype_resolution.cast_parameters(loaded.model)
    if mixers:
        from labkit.engine.runner.packed_recurrent_layers import replace_mixers

        replace_mixers(loaded.model, mixers)
    blocks = CompiledBlocks(loaded.model) if compiled else None
    conversion = replace(conversion, weights=dtype_resolution.weight_bytes_by_dtype(loaded.model))
    return PackedForward(loaded, conversion, first_layer, blocks)


def _require_int8(loaded: LoadedModel, conversion: Conversion) -> None:
    """Raise ``EngineError`` unless labkit's kernels multiply some weights by int8 activations."""
    if "int8" in conversion.activations:
        return
    reason = conversion.reason and f"the model runs on MLX ({conversion.reason})"
    reason = reason or "it has no linear layer with weights of 4 or 8 bits"
    raise EngineError(
        f"engine.activations=int8: model_type={loaded.model_type}: {reason}; set "
        "engine.activations=float32"
    )


def _convert_to_numpy(
    loaded: LoadedModel, device: Device, activations: Activations, mixers: Sequence[MixerSpec]
) -> Conversion:
    """Convert the model to NumPy arrays, or return the reason that it stays on MLX."""
    from labkit.engine.numpy_port.model_conversion import Conversion, convert

    if mixers:
        return Conversion("its recurrent layers call MLX's functions on activations")
    if device is not Device.cpu:
        where = f"engine.attention.device={device.value}"
        return Conversion(f"{where}: the model runs on the device of its attention")
    try:
        return convert(
            loaded.model,
            low_precision=loaded.matrix_storage is dtype_resolution.MatrixStorage.as_stored,
            activations=activations.value,
        )
    except ArithmeticError as error:  # the kernels for int8 activations fail their check
        raise EngineError(str(error)) from error
