"""Runs small decode steps by replaying a model's captured graph (``cpu.replay.graph_replay``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from labkit.cpu.capture.graph_capture import CapturedGraph, GraphCapture
from labkit.cpu.capture.traced_array import NotCapturable
from labkit.cpu.replay.graph_replay import MAX_REPLAY_ROWS, ExecutableGraph
from labkit.engine.attention.attention_protocol import CacheGroupAttention
from labkit.engine.attention.backends.cpu_backend import CpuBackend
from labkit.engine.attention.backends.replay_state import CapturedLayers, replay_state
from labkit.engine.engine_protocol import Counters
from labkit.engine.model.layer_cache import ForwardContext, ModelCaches
from labkit.engine.sampling.step_logits import GreedyLogits

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionMetadata
    from labkit.engine.batch import Batch


class GraphRunner:
    """Captures the graph of a model's forward, and replays the graph for small decode steps.

    The constructor captures the graph. ``reason`` is the reason that the forward could not be
    captured (None: it was captured).

    ``model``: the model, called with token ids and ``cache=caches.layers``, as ``PackedForward``
    does. ``caches``: the caches of the model's layers.
    """

    def __init__(self, model: Callable[..., Any], caches: ModelCaches) -> None:
        self.reason: str | None = None
        self._graph: ExecutableGraph | None = None
        # The keys are weak, because a shared model outlives the KV memory of an engine.
        self._layers: WeakKeyDictionary[CpuBackend, CapturedLayers] = WeakKeyDictionary()
        try:
            self._graph = ExecutableGraph(_capture_forward(model, caches))
        except NotCapturable as error:
            self.reason = str(error)
        except Exception as error:
            # Foreign code may fail in any way on traced arrays.
            line = (str(error).splitlines() or [""])[0]
            self.reason = (
                f"the model's forward fails on traced arrays: {type(error).__name__}: {line}"
            )

    def run(
        self, batch: Batch, attention: Any, metadata: AttentionMetadata, counters: Counters
    ) -> GreedyLogits | None:
        """Replay the graph and return the logits of all rows, [rows, vocabulary].

        Return None if the graph cannot run this step. The caller must then run the forward, which
        raises an error if the step is invalid.

        The counters of the attention launches are added to ``counters`` when these are next read.
        If a stamp is wrong or a layer has a sliding window, the launches are appended to
        ``metadata.launches`` instead, for ``packed_forward.count_launches``.
        """
        rows, graph = len(batch.tokens), self._graph
        if graph is None or batch.prefill_tokens or not 0 < rows <= MAX_REPLAY_ROWS:
            return None
        layers = self._layers.get(attention)
        if layers is None:
            if replay_obstacle(attention) is not None:
                return None
            layers = CapturedLayers(attention, graph.captured.attention)
            self._layers[attention] = layers
        graph.set_shape(metadata.total_q, metadata.max_seq_len)
        state = replay_state(attention, layers, graph, metadata)
        if state is None:
            return None
        logits = np.empty((rows, graph.captured.logits_width), np.float32)
        inputs = state.inputs(metadata, attention.scratch)
        num_wrong = graph.run(batch.tokens, logits, metadata.lookup, inputs)
        if num_wrong < 0:
            return None
        state.end_step(metadata, num_wrong, counters)
        return GreedyLogits(logits, graph.best_tokens[:rows].tolist(), graph.leads[:rows].tolist())


def replay_obstacle(attention: Any) -> str | None:
    """Return why an attention cannot be replayed; None for ``CpuBackend``, but no subclass."""
    if type(attention) is CpuBackend:
        return None
    if isinstance(attention, CacheGroupAttention):
        return "a captured graph has one block table, and engine.kv.window_pools=true has several"
    return (
        "only engine.attention.backend=fused on engine.attention.device=cpu is captured, and the "
        f"attention is {type(attention).__name__}"
    )


def _capture_forward(model: Callable[..., Any], caches: ModelCaches) -> CapturedGraph:
    """Run a forward on traced arrays, and return its graph."""
    capture = GraphCapture()
    attention: Any = _CapturingAttention(capture)
    context = ForwardContext(attention, attention, None, capture.positions())
    with caches.use(context):
        return capture.finish(model(capture.token_ids(), cache=caches.layers))


class _CapturingAttention:
    """The attention backend of the forward that is captured."""

    def __init__(self, capture: GraphCapture) -> None:
        self._capture = capture
        self._options: dict[int, dict[str, Any]] = {}

    def bind(self, layer: int, **options: Any) -> None:
        self._options[layer] = options

    def forward(self, layer: int, q: Any, k: Any, v: Any, _metadata: Any) -> Any:
        return self._capture.attend(layer, q, k, v, self._options[layer])
