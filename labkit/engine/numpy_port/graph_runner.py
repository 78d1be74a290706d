"""A forward on NumPy arrays whose small steps are replayed (``labkit.cpu.graph_replay``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.cpu.graph_capture import MAX_REPLAY_ROWS, GraphCapture, NotCapturable
from labkit.cpu.graph_replay import ExecutableGraph
from labkit.engine.attention.cpu_backend import CpuBackend
from labkit.engine.device_logits import GreedyLogits
from labkit.engine.engine_protocol import Counters
from labkit.engine.layer_cache import ForwardContext, LayerCache

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionMetadata
    from labkit.engine.attention.captured_layers import CapturedLayers
    from labkit.engine.batch import Batch


class GraphRunner:
    """A model's forward as launches that are replayed.

    ``reason``: why there are none, or None; ``model`` is called as ``PackedForward`` calls it.
    """

    def __init__(self, model: Callable[..., Any], caches: Sequence[LayerCache]) -> None:
        self.reason: str | None = None
        self._tape: ExecutableGraph | None = None
        self._owner: Callable[[], CpuBackend | None] = lambda: None
        self._layers: CapturedLayers
        try:
            self._tape = ExecutableGraph(_record(model, caches))
        except NotCapturable as error:
            self.reason = str(error)
        except Exception as error:
            # Foreign code on what is not even an array may fail in any way.
            line = (str(error).splitlines() or [""])[0]
            self.reason = f"its forward fails on symbols: {type(error).__name__}: {line}"

    def run(
        self, batch: Batch, attention: Any, plan: AttentionMetadata, counters: Counters
    ) -> GreedyLogits | None:
        """Return the logits of all rows [rows, vocabulary]; None: this step is not for the tape."""
        rows = len(batch.tokens)
        tape = self._tape
        if tape is None or batch.prefill_tokens or not 0 < rows <= MAX_REPLAY_ROWS:
            return None
        if self._owner() is not attention:
            if not can_replay(attention):
                return None
            self._layers = attention.taken(tape.recording.attended)
            # Weakly: a model outlives the KV memory of its engines.
            self._owner = weakref.ref(attention)
        logits = np.empty((rows, tape.recording.logits), np.float32)
        if not attention.replay(tape, batch.tokens, plan, self._layers, logits, counters):
            return None  # what is wrong the forward itself says
        return GreedyLogits(logits, tape.tokens[:rows].tolist(), tape.leads[:rows].tolist())


def can_replay(attention: Any) -> bool:
    """Tell whether what a step attends with is replayed: somebody's own may do as it likes."""
    return type(attention) is CpuBackend


def _record(model: Callable[..., Any], caches: Sequence[LayerCache]) -> Any:
    """Run a forward on symbols, and return its recording."""
    capture = GraphCapture()
    noting: Any = _Noting(capture)
    ids, context = capture.ids(), ForwardContext(noting, noting, None, capture.places())
    for cache in caches:
        cache.context = context
    try:
        return capture.finish(model(ids, cache=caches))
    finally:
        for cache in caches:
            cache.context = None


class _Noting:
    """Attention that is recorded."""

    def __init__(self, capture: GraphCapture) -> None:
        self._recorder = capture
        self._bound: dict[int, dict[str, Any]] = {}

    def bind(self, layer: int, **options: Any) -> None:
        """Note what a layer is."""
        self._bound[layer] = options

    def forward(self, layer: int, q: Any, k: Any, v: Any, _plan: Any) -> Any:
        """Record."""
        return self._recorder.attend(layer, q, k, v, self._bound[layer])
