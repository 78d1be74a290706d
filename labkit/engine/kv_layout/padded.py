"""``engine.kv.layout=padded``: all running requests in one array, left-padded to the longest.

As in mlx_lm's ``BatchKVCache``, all rows end at the same column, so a decode step appends one
column to every row. All rows are copied into a new array when a request joins or leaves, and when
the array grows (in steps of 256 tokens). MLX's attention runs over the whole array with a mask. The
model also computes a padded batch: chunks shorter than the longest chunk of the step are padded
with token 0, and the results of the padding are dropped.

        column   0    1    2    3    4
        row A   a0   a1   a2   a3   a4      pad 0, length 5
        row B    -    -   b0   b1   b2      pad 2, length 3

With static admission no row is removed before the batch ends: the row of a finished request stays,
and every decode step computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.backends.unpaged_sdpa import SdpaAttention, SdpaLayer
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.attention.launch_evidence import LaunchReport
from labkit.engine.kv_cache_interface import BlockTable, KVCache, StepAttention
from labkit.engine.kv_layout.unpaged_layout_base import DenseKV, DenseKVCacheManager, TokenMove
from labkit.engine.memory_budget.required_kv_slots import round_up_to_step

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState

Ints = NDArray[np.int64]


def create(shapes: tuple[KVShape, ...], capacity: int, dtype: str, *, static: bool) -> KVCache:
    """Create a cache whose array has at most ``capacity`` tokens (rows times columns).

    ``static``: the rows of finished requests stay until all requests have finished.
    """
    manager = PaddedKVCacheManager(shapes, capacity, dtype, static=static)
    return KVCache(manager, manager.attention, manager.prepare_step)


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


class PaddedKVCacheManager(DenseKVCacheManager):
    """Promises rows to requests. A row is as wide as the longest prompt plus the longest output.

    ``rows`` has the rows of the array, followed by the rows that join in the next step.
    ``columns`` is the number of keys that attention read. ``empty_columns`` is the number of those
    keys that are not a token of a live request.
    """

    def __init__(
        self, shapes: tuple[KVShape, ...], capacity: int, dtype: str, *, static: bool
    ) -> None:
        super().__init__(shapes, capacity, "a row", dtype)
        self.attention = SdpaAttention()
        self.dense = DenseKV(shapes, self.stats, dtype)
        self.rows: list[PaddedRow] = []
        self.columns = self.empty_columns = 0
        self._static = static
        self._row_of: dict[str, PaddedRow] = {}

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        request_id = state.request_id
        if request_id in self._row_of:
            raise ValueError(f"request {request_id} has a row already")
        output = max(0, num_tokens - state.num_tokens)
        row = PaddedRow(request_id, self._next_row_id, state.num_tokens, output)
        rows = [*self.rows, row]
        num_columns = max(r.prompt for r in rows) + max(r.output for r in rows)
        if len(rows) * round_up_to_step(num_columns) > (1 - spare) * self._capacity:
            return None
        row.row_id = self._add_row_id(request_id)
        self.rows.append(row)
        self._row_of[request_id] = row
        return 0

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Return whether the reserved row has room for ``num_tokens``. A row is never enlarged."""
        return num_tokens <= self._row_of[request_id].prompt + self._row_of[request_id].output

    def num_slots(self, table: BlockTable) -> int:
        return self.dense.capacity

    def _free(self, request_id: str, table: BlockTable) -> None:
        row = self._row_of.pop(request_id)
        row.live = False
        if not self._static or row.place is None:
            self.rows.remove(row)
        if not self._row_of:
            self.rows.clear()
            self.dense.free()

    def rearrange(self) -> None:
        """Copy all rows into a new left-padded array if a row has joined or left."""
        if len(self.rows) == self.dense.rows and all(r.place is not None for r in self.rows):
            return
        end = max(row.end for row in self.rows)
        old = [(row.place, row.pad) for row in self.rows]
        for place, row in enumerate(self.rows):
            row.pad, row.place = end - (row.end - row.pad), place
        smallest_pad = min(row.pad for row in self.rows)
        for row in self.rows:
            row.pad -= smallest_pad
        self._reallocate(end - smallest_pad, old)

    def widen(self, num_columns: int) -> None:
        """Copy all rows into a wider array if the array has fewer than ``num_columns`` columns."""
        if num_columns > self.dense.capacity:
            self._reallocate(num_columns, [(row.place, row.pad) for row in self.rows])

    def _reallocate(self, num_columns: int, old: list[tuple[int | None, int]]) -> None:
        moves = [
            TokenMove(place, pad, index, row.pad, row.length)
            for index, ((place, pad), row) in enumerate(zip(old, self.rows, strict=True))
            if place is not None and row.length
        ]
        self.dense.reallocate(len(self.rows), round_up_to_step(num_columns), moves)

    def lingering_requests(self) -> list[str]:
        return [row.request_id for row in self.rows if not row.live]

    def check(self, running: set[str]) -> None:
        super().check(running)
        live = [row.row_id for row in self.rows if row.live]
        if sorted(live) != sorted(row.row_id for row in self._row_of.values()):
            raise AssertionError("a live row belongs to no request")
        if len(live) < len(self.rows) and not (self._static and live):
            raise AssertionError("a row remains although its request has ended")
        if self.stats.allocated != self.dense.nbytes:
            raise AssertionError("the count of allocated bytes disagrees with the array")

    def counters(self) -> dict[str, float]:
        """Return the counters, with ``padding.waste_pct``: padding in percent of the keys read."""
        waste = 100 * self.empty_columns / self.columns if self.columns else 0.0
        return {**super().counters(), "padding.waste_pct": waste}

    def reset_counters(self) -> None:
        super().reset_counters()
        self.columns = self.empty_columns = 0

    def prepare_step(self, batch: Batch) -> tuple[Batch, StepAttention]:
        self.rearrange()
        row_of = {row.row_id: row for row in self.rows}
        scheduled = [row_of[int(row_id)] for row_id in batch.block_tables[:, 0]]
        contexts = list(zip(scheduled, batch.seq_lens.tolist(), strict=True))
        self.widen(max(row.pad + context for row, context in contexts))
        for row, context in contexts:
            row.length = context
        finished = [row for row in self.rows if not row.live]
        padded, step = pad_batch(batch, scheduled, finished, self.dense)
        self.columns += step.columns
        self.empty_columns += step.empty_columns
        return padded, StepAttention(self.attention, step, {"layout.padded": 1}, step.target)


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
        arrays = self._dense.layer(layer)
        for array, new in zip(arrays, (k, v), strict=False):  # latent: no values
            array.store(where, new[target])

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
        """Return the computed rows in the columns that have tokens: a copy unless adjacent."""
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
