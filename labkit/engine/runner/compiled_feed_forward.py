"""``mx.compile`` of a model's feed-forward blocks, one graph per shape.

A whole step is not compiled, because the shapes of attention's operands (such as block tables)
change from step to step, and because attention writes in place to KV pools, which nothing else may
reference. Only the feed-forward blocks between the attentions are compiled. MLX keeps a graph for
every shape and never frees it (mlx #4464), so compiled blocks are used only in steps that have few
different shapes: pure decodes, if ``engine.decode_shape`` is not exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit.engine.engine_protocol import Counters

Block = Callable[[Any], Any]
# The attributes under which mlx_lm's layers have their feed-forward block.
BLOCK_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


class CompiledBlocks:
    """The feed-forward blocks of an mlx_lm model on MLX arrays, which can run compiled.

    Each block is replaced in its layer. Layers without a feed-forward block are not changed.
    ``num_blocks`` is the number of blocks replaced. They run compiled while ``enabled`` is true.
    """

    def __init__(self, model: Any) -> None:
        self.enabled = False
        self.calls = self.traces = 0  # since the last call of ``count``
        blocks = [
            (layer, name)
            for layer in model.layers
            for name in BLOCK_NAMES
            if (block := getattr(layer, name, None)) is not None  # None: a layer without it
            and not hasattr(block, "takes_cache")
        ]
        for layer, name in blocks:
            setattr(layer, name, _SwitchableBlock(getattr(layer, name), self))
        self.num_blocks = len(blocks)

    def count(self, counters: Counters) -> None:
        """Add the graphs traced and reused since the last call of ``count`` to the counters.

        ``compile.count`` is the number of graphs traced, ``compile.reused`` the number of calls of
        a block that reused a graph.
        """
        if self.calls:
            counters.add("compile.count", self.traces)
            counters.add("compile.reused", self.calls - self.traces)
        self.calls = self.traces = 0


class _SwitchableBlock(threading.local):
    """Replaces a feed-forward block, and runs it compiled while ``state.enabled`` is true.

    Each thread has its own compiled function. MLX caches graphs by thread and by the function's
    address. When a function is freed, its graphs are removed only from the cache of the thread that
    called it last (up to mlx 0.32.4). Suppose a function were called in two threads, the
    self-test's and a pipeline's worker. Its graphs would stay in one of the caches, and the next
    function at the same address would run them with the weights of a model that no longer exists.
    """

    def __init__(self, block: Block, state: CompiledBlocks) -> None:
        import mlx.core as mx

        def trace(x: Any) -> Any:
            state.traces += 1  # MLX runs this Python code once per graph
            return block(x)

        self._block, self._state = block, state
        self._compiled: Block = mx.compile(trace)

    def __call__(self, x: Any) -> Any:
        if not self._state.enabled:
            return self._block(x)
        self._state.calls += 1
        return self._compiled(x)
