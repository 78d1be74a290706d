"""Pad steps of pure decodes, so that they have few different shapes (``engine.decode_shape``)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from labkit.config import DecodeShape
from labkit.engine.batch import Batch, with_padding
from labkit.engine.engine_protocol import Counters
from labkit.engine.request import RequestState

# Each function returns the rows of a step of pure decodes: ``needed`` or more, up to ``capacity``.
# A padding row is a sequence that belongs to no request: token 0 at position 0, written to the
# null block, which no request reads. Its logits are computed, as in a graph of fixed shape, and
# ignored.


def bucketed(needed: int, capacity: int) -> int:
    """Return ``needed`` rounded up to a power of two, but at most ``capacity``."""
    return max(needed, min(1 << (needed - 1).bit_length(), capacity))


def fixed(needed: int, capacity: int) -> int:
    """Return ``capacity``.

    The authors of LocalAI's patched llama.cpp tested this and rejected it for serving: padding rows
    cost as much as rows of requests (DECODE_SERVING_SCOPE.md, "Padded-shape lever").
    """
    return max(needed, capacity)


def captured(needed: int, capacity: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending ``sizes`` that fits, or ``needed`` if none does."""
    fitting = (size for size in sizes if needed <= size <= capacity)
    return next(fitting, needed)


ROW_COUNTS: dict[DecodeShape, Callable[[int, int], int]] = {
    DecodeShape.exact: lambda needed, capacity: needed,
    DecodeShape.bucketed: bucketed,
    DecodeShape.fixed: fixed,
}


class DecodePadding:
    """Pads steps of pure decodes, and counts how often the shape of a step was seen before.

    ``capacity`` is the largest number of rows that a step of pure decodes can have. ``sizes`` are
    those of ``DecodeShape.captured``. The counter
    ``shape.new`` is the number of steps with a new shape, and ``shape.reused`` the number of steps
    whose shape was seen before: an engine that caches a graph per shape could replay one.
    ``shape.repeated`` is the number of steps with the shape of the previous step: an engine that
    keeps only the last graph could replay it. ``shape.same_requests`` counts those of them with the
    same requests in the same rows, which llama.cpp asks for, too.
    """

    def __init__(
        self, shape: DecodeShape, capacity: int, counters: Counters, sizes: Sequence[int] = ()
    ) -> None:
        with_sizes = functools.partial(captured, sizes=sizes)
        self._row_count = with_sizes if shape is DecodeShape.captured else ROW_COUNTS[shape]
        self._capacity = capacity
        self._counter = f"decode_shape.{shape.value}"
        self._counters = counters
        self._seen: set[tuple[int, int]] = set()
        self._last: tuple[int, int] | None = None
        self._requests: tuple[RequestState, ...] = ()

    def pad(self, batch: Batch) -> Batch:
        """Return the batch with padding rows added. A batch with prefill is returned unchanged."""
        if not batch.prefill_tokens:
            needed = len(batch.tokens)
            rows = self._row_count(needed, self._capacity)
            if rows > needed:
                batch = with_padding(batch, rows - needed)
            self._counters.add(self._counter)
        key = (len(batch.tokens), len(batch.logit_rows))
        repeated, requests = key == self._last, batch.sampling
        same = len(requests) == len(self._requests) and all(
            map(operator.is_, requests, self._requests)
        )
        self._counters.add_all(
            {
                "shape.reused" if key in self._seen else "shape.new": 1,
                "shape.repeated": repeated,
                "shape.same_requests": repeated and same,
                "tokens.padded": batch.padding,
            }
        )
        self._seen.add(key)
        self._last, self._requests = key, requests
        return batch
