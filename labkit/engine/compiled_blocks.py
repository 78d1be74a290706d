"""``mx.compile`` of a model's feed-forward blocks, one graph per shape.

Attention has operands of its own shape in every step (block tables, maps) and writes pools that
nothing else may hold, so a whole step is not compiled; what lies between two attentions is.
MLX keeps a graph for every shape and never forgets one (mlx #4464), so only steps of few shapes
use them: decodes alone, where ``engine.decode_shape`` is not exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.engine.engine_protocol import Counters

Block = Callable[[Any], Any]
# What mlx_lm's layers call the block after attention.
NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


class CompiledBlocks:
    """The feed-forward blocks of one model, each replaced by one that can run compiled.

    The model is mlx_lm's, on MLX arrays; layers without such a block stay as they are. ``on``:
    whether the blocks run compiled now; ``number``: how many there are.
    """

    def __init__(self, model: Any) -> None:
        self._tally = _Tally()
        found = [(layer, name) for layer in model.layers for name in NAMES if hasattr(layer, name)]
        for layer, name in found:
            setattr(layer, name, _Switch(getattr(layer, name), self._tally))
        self.number = len(found)

    @property
    def on(self) -> bool:
        """Whether the blocks run compiled now."""
        return self._tally.on

    @on.setter
    def on(self, value: bool) -> None:
        self._tally.on = value

    def count(self, counters: Counters) -> None:
        """Add what happened since the last call, if anything.

        ``compile.count``: graphs traced; ``compile.reused``: calls that found theirs.
        """
        tally = self._tally
        if tally.calls:
            counters.add("compile.count", tally.traces)
            counters.add("compile.reused", tally.calls - tally.traces)
        tally.calls = tally.traces = 0


@dataclass(slots=True)
class _Tally:
    on: bool = False
    calls: int = 0
    traces: int = 0


class _Switch:
    """Stands where a block stood; runs it as it is, or compiled."""

    def __init__(self, block: Block, tally: _Tally) -> None:
        self._block = block
        self._tally = tally
        self._graphs = _Graphs(block, tally)

    def __call__(self, x: Any) -> Any:
        if not self._tally.on:
            return self._block(x)
        self._tally.calls += 1
        return self._graphs.run(x)


class _Graphs(threading.local):
    """A block's compiled function, another one in each thread that asks for it.

    MLX files graphs by thread and by the function's address, and a function that is dropped
    takes its graphs out of the cache of the thread that called it last, no other (up to mlx
    0.32.4). Called in two threads, as by the self-test and by a pipeline's worker, it would
    leave graphs behind, and the next function at that address would be given them: the
    weights of a model that is gone.
    """

    def __init__(self, block: Block, tally: _Tally) -> None:
        import mlx.core as mx

        def trace(x: Any) -> Any:
            tally.traces += 1  # Python runs once per graph
            return block(x)

        self.run: Block = mx.compile(trace)
