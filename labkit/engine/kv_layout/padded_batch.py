"""One step over the padded rectangle: the packed batch padded, masked and attended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import sdpa
from labkit.engine.attention.launch_report import LaunchReport
from labkit.engine.attention.sdpa import SdpaLayer

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.kv_layout.dense_kv import DenseKV
    from labkit.engine.kv_layout.padded import PaddedRow

Ints = NDArray[np.int64]


def pad_batch(
    batch: Batch, taking: Sequence[PaddedRow], staying: Sequence[PaddedRow], rectangle: DenseKV
) -> tuple[Batch, PaddedStep]:
    """Make a packed, ragged batch a rectangle of tokens; return that and its attention.

    ``taking``: the row of each chunk, in the batch's order; ``staying``: rows that only keep
    their place. The result has as many tokens for each row, in the order of the rectangle,
    chunks right-aligned, the rest padding.
    """
    lengths = np.diff(batch.cu_seqlens_q)
    width = int(lengths.max())
    order = sorted([*taking, *staying], key=lambda row: row.place or 0)
    index = {row.number: i for i, row in enumerate(order)}
    row_of = np.array([index[row.number] for row in taking])
    # Where each packed token goes: at the end of its row's stretch of ``width`` tokens.
    shift = (row_of + 1) * width - batch.cu_seqlens_q[1:]
    target = np.arange(batch.total_q) + np.repeat(shift, lengths)
    total = len(order) * width
    tokens, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
    tokens[target], positions[target] = batch.tokens, batch.positions
    computed = batch._replace(
        tokens=tokens,
        positions=positions,
        cu_seqlens_q=np.arange(0, total + 1, width, dtype=np.int32),
        seq_lens=np.array([row.length for row in order], np.int32),
        block_tables=np.array([[row.number] for row in order], np.int32),
        logit_rows=target[batch.logit_rows].astype(np.int32),
    )
    pads = np.array([row.pad for row in order])
    columns = positions[target] + pads[target // width]
    return computed, PaddedStep(rectangle, order, width, target, columns)


class PaddedStep:
    """One step; see ``SdpaStep``.

    ``rows`` are computed, in the order of the rectangle, ``width`` query tokens each;
    ``target`` and ``columns`` are of every real token: its index among the computed tokens, and
    its column.
    """

    def __init__(
        self,
        rectangle: DenseKV,
        rows: Sequence[PaddedRow],
        width: int,
        target: Ints,
        columns: Ints,
    ) -> None:
        self.launches: list[LaunchReport] = []
        self._rectangle = rectangle
        self._rows = rows
        self._width = width
        self._target = target
        self._columns = columns
        self._places = np.array([row.place for row in rows])
        self._begin = min(row.pad for row in rows)
        self._end = max(row.pad + row.length for row in rows)
        self._masks: dict[int | None, mx.array] = {}

    @property
    def columns(self) -> int:
        """Keys that attention reads over in each layer."""
        return len(self._rows) * (self._end - self._begin)

    @property
    def empty_columns(self) -> int:
        """Those of them that hold no token of a live request."""
        return self.columns - sum(row.length for row in self._rows if row.live)

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Store the real tokens' keys and values; padding is not written."""
        places = self._places[self._target // self._width]
        target: Any = self._target
        where: Any = (places, slice(None), self._columns)
        if isinstance(k, mx.array):
            target = mx.array(target)
            where = (mx.array(places), slice(None), mx.array(self._columns))
        for array, new in zip(self._rectangle.layer(layer), (k, v), strict=True):
            sdpa.store(array, where, new[target])

    def pending(self) -> list[mx.array]:
        """Return the rectangle."""
        return self._rectangle.arrays()

    def attend(self, layer: SdpaLayer, q: Any) -> tuple[mx.array, LaunchReport]:
        """Attend over the rectangle with a mask, in one call."""
        k, v = (self._take(array) for array in self._rectangle.layer(layer.index))
        out = mx.fast.scaled_dot_product_attention(
            sdpa.heads_first(q.reshape(len(self._rows), self._width, *q.shape[1:])),
            k,
            v,
            scale=layer.scale,
            mask=self._mask(layer.window),
            sinks=layer.sinks,
        )
        tokens = out.transpose(0, 2, 1, 3)
        size = k.nbytes + v.nbytes + 2 * q.nbytes
        made = sdpa.layer_report(layer.index, 1, self.columns, self.empty_columns, size)
        return tokens.reshape(len(q), *tokens.shape[2:]), made

    def _take(self, array: mx.array) -> mx.array:
        """Return the rows computed, first to last column; copied if they are not neighbours."""
        first, last = int(self._places[0]), int(self._places[-1])
        if last - first + 1 == len(self._places):
            return array[first : last + 1, :, self._begin : self._end]
        return array[mx.array(self._places)][:, :, self._begin : self._end]

    def _mask(self, window: int | None) -> mx.array:
        """Return who sees what, bool [rows, 1, width, columns]; made once per window.

        A padding query sees the first column read, whatever that holds: a softmax over nothing
        is not a number, and its result is dropped.
        """
        if window not in self._masks:
            seen = np.full((len(self._rows), self._width), -1)
            seen.reshape(-1)[self._target] = self._columns
            pads = np.array([row.pad for row in self._rows])
            low = np.broadcast_to(pads[:, None], seen.shape)
            if window is not None:
                low = np.maximum(low, seen - window + 1)
            keys = np.arange(self._begin, self._end)
            mask = (keys >= low[..., None]) & (keys <= seen[..., None])
            mask[seen < 0, 0] = True
            self._masks[window] = mx.array(mask[:, None])
        return self._masks[window]
