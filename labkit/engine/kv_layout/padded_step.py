"""A step of the padded layout: the batch as a rectangle of tokens, and its masked attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.backends.unpaged_sdpa import SdpaLayer
from labkit.engine.attention.launch_report import LaunchReport

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.kv_layout.unpaged_layout_base import DenseKV

Ints = NDArray[np.int64]


@dataclass(slots=True)
class PaddedRow:
    """A request's row in the array, with its tokens in the columns ``[pad, pad + length)``.

    ``prompt`` is the number of tokens known when the request joins, ``output`` the largest number
    of tokens that may follow. ``place`` is the row's index in the array, or None if it has not
    joined yet. ``live`` is false if the request has ended.
    """

    request_id: str
    row_id: int
    prompt: int
    output: int
    place: int | None = None
    pad: int = 0
    length: int = 0
    live: bool = True

    @property
    def end(self) -> int:
        """The first column after the row's tokens, and after all tokens of its prompt."""
        return self.pad + max(self.length, self.prompt)


def pad_batch(
    batch: Batch, scheduled: Sequence[PaddedRow], finished: Sequence[PaddedRow], dense: DenseKV
) -> tuple[Batch, PaddedStep]:
    """Return a packed batch as a rectangle of tokens, and the step's attention.

    Every row of the rectangle has the length of the longest chunk: padding, then the chunk.

    ``batch``: the packed, ragged batch. ``scheduled``: the row of each chunk, in the batch's order.
    ``finished``: the rows of finished requests, which are computed as padding. ``dense``: the array
    of all rows. The computed batch has its rows in the order of this array.
    """
    lengths = np.diff(batch.cu_seqlens_q)
    width = int(lengths.max())
    rows = sorted([*scheduled, *finished], key=lambda row: row.place or 0)
    index = {row.row_id: i for i, row in enumerate(rows)}
    row_of = np.array([index[row.row_id] for row in scheduled])
    # Each packed token's index in the rectangle: at the end of its row's ``width`` tokens.
    shift = (row_of + 1) * width - batch.cu_seqlens_q[1:]
    target = np.arange(batch.total_q) + np.repeat(shift, lengths)
    total = len(rows) * width
    tokens, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
    tokens[target], positions[target] = batch.tokens, batch.positions
    padded = batch._replace(
        tokens=tokens,
        positions=positions,
        cu_seqlens_q=np.arange(0, total + 1, width, dtype=np.int32),
        seq_lens=np.array([row.length for row in rows], np.int32),
        block_tables=np.array([[row.row_id] for row in rows], np.int32),
        logit_rows=target[batch.logit_rows].astype(np.int32),
    )
    pads = np.array([row.pad for row in rows])
    columns = positions[target] + pads[target // width]
    return padded, PaddedStep(dense, rows, width, target, columns)


class PaddedStep:
    """The attention of one step over the padded array; see ``SdpaStep``.

    ``dense``: the array of all rows. ``rows``: the rows that are computed, in the array's order.
    ``width``: the number of query tokens per row, including padding. ``target``: for each token
    that is not padding, its index among the ``len(rows) * width`` computed tokens. ``columns``: for
    each token that is not padding, its column in the array.
    """

    def __init__(
        self, dense: DenseKV, rows: Sequence[PaddedRow], width: int, target: Ints, columns: Ints
    ) -> None:
        self.launches: list[LaunchReport] = []
        self._dense = dense
        self._rows = rows
        self._width = width
        self.target = target
        self._columns = columns
        self._places = np.array([row.place for row in rows])
        self._begin = min(row.pad for row in rows)
        self._end = max(row.pad + row.length for row in rows)
        self._masks: dict[int | None, mx.array] = {}

    @property
    def columns(self) -> int:
        """The number of keys that attention reads in each layer, including padding."""
        return len(self._rows) * (self._end - self._begin)

    @property
    def empty_columns(self) -> int:
        """The number of keys among ``columns`` that are not a token of a live request."""
        return self.columns - sum(row.length for row in self._rows if row.live)

    def write(self, layer: int, k: Any, v: Any) -> None:
        places = self._places[self.target // self._width]
        target: Any = self.target
        where: Any = (places, slice(None), self._columns)
        if isinstance(k, mx.array):
            target = mx.array(target)
            where = (mx.array(places), slice(None), mx.array(self._columns))
        arrays = self._dense.plain_layer(layer)
        for array, new in zip(arrays, (k, v), strict=False):  # latent: no values
            unpaged_sdpa.store(array, where, new[target])

    def pending(self) -> list[mx.array]:
        return self._dense.arrays()

    def attend(self, layer: SdpaLayer, q: Any) -> tuple[mx.array, LaunchReport]:
        k, v, kv_bytes = self._dense.keys_and_values(layer.index, self._computed_rows)
        rows = q.reshape(len(self._rows), self._width, *q.shape[1:])
        output = unpaged_sdpa.attend(
            unpaged_sdpa.heads_first(rows), k, v, layer, self._mask(layer.window)
        )
        tokens = output.transpose(0, 2, 1, 3)
        nbytes = kv_bytes + 2 * q.nbytes
        report = unpaged_sdpa.layer_report(layer.index, 1, self.columns, self.empty_columns, nbytes)
        return tokens.reshape(len(q), *tokens.shape[2:]), report

    def _computed_rows(self, array: mx.array) -> mx.array:
        """Return the rows of ``array`` that the step computes, in the columns that have tokens.

        The result is a copy if these rows are not adjacent.
        """
        first, last = int(self._places[0]), int(self._places[-1])
        if last - first + 1 == len(self._places):
            return array[first : last + 1, :, self._begin : self._end]
        return array[mx.array(self._places)][:, :, self._begin : self._end]

    def _mask(self, window: int | None) -> mx.array:
        """Return the mask for a window, bool [rows, 1, width, columns]: true if a query sees a key.

        A padding query sees the first column, because a softmax over no key is NaN. Its result
        is dropped.
        """
        if window not in self._masks:
            query_columns = np.full((len(self._rows), self._width), -1)
            query_columns.reshape(-1)[self.target] = self._columns
            pads = np.array([row.pad for row in self._rows])
            first_visible = np.broadcast_to(pads[:, None], query_columns.shape)
            if window is not None:
                first_visible = np.maximum(first_visible, query_columns - window + 1)
            keys = np.arange(self._begin, self._end)
            mask = (keys >= first_visible[..., None]) & (keys <= query_columns[..., None])
            mask[query_columns < 0, 0] = True
            self._masks[window] = mx.array(mask[:, None])
        return self._masks[window]
