"""``padded``: all running requests in one rectangle, left-padded to the longest.

As mlx_lm's ``BatchKVCache``: the rows end at one column, so a decode step appends one
column to all.  A request that joins or leaves makes a new rectangle into which every row
is copied; so does growth, in steps of 256 tokens.  Attention is MLX's, over the whole
rectangle with a mask, and the model computes a rectangle too: short chunks are padded to
the longest of the step with inert rows of token 0, whose results are dropped.

With static admission nothing leaves before the batch ends: the row of a finished request
stays, and every decode step computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.engine.attention.sdpa import SdpaAttention
from labkit.engine.budget.kv_demand import round_up_to_step
from labkit.engine.kv_layout.dense_kv import DenseKV, DenseKVCacheManager, TokenMove
from labkit.engine.kv_layout.kv_cache_manager import BlockTable, KVCache, StepAttention
from labkit.engine.kv_layout.kv_shape import KVShape
from labkit.engine.kv_layout.padded_batch import pad_batch

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState


def create(shapes: tuple[KVShape, ...], capacity: int, dtype: str, *, static: bool) -> KVCache:
    """Make a layout whose largest rectangle has ``capacity`` rows times columns.

    ``static``: rows of finished requests stay until all are finished.
    """
    cache = PaddedKVCacheManager(shapes, capacity, dtype, static=static)
    return KVCache(cache, PaddedMemory(cache))


@dataclass(slots=True)
class PaddedRow:
    """A request's row: its tokens lie in the columns ``pad`` to ``pad + length``.

    ``prompt`` tokens are known when it joins, ``output`` more may come. ``place`` is its
    index in the rectangle; None: not in it yet.
    """

    request_id: str
    number: int
    prompt: int
    output: int
    place: int | None = None
    pad: int = 0
    length: int = 0
    live: bool = True

    @property
    def end(self) -> int:
        """The column after its last token, once its prompt is computed."""
        return self.pad + max(self.length, self.prompt)


class PaddedKVCacheManager(DenseKVCacheManager):
    """Who has which row. A rectangle is promised for the longest prompt and output."""

    def __init__(
        self, shapes: tuple[KVShape, ...], capacity: int, dtype: str, *, static: bool
    ) -> None:
        super().__init__(shapes, capacity, "a row", dtype)
        self.rectangle = DenseKV(shapes, self.accounts, dtype)
        self.rows: list[PaddedRow] = []
        self.columns = self.empty_columns = 0
        self._static = static
        self._held: dict[str, PaddedRow] = {}

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Promise a row, if the rectangle of all rows would fit; see ``KVCacheManager.reserve``."""
        request_id = state.request_id
        if request_id in self._held:
            raise ValueError(f"request {request_id} holds a row already")
        row = PaddedRow(
            request_id, self._next, state.num_tokens, max(0, num_tokens - state.num_tokens)
        )
        rows = [*self.rows, row]
        longest = max(r.prompt for r in rows) + max(r.output for r in rows)
        if len(rows) * round_up_to_step(longest) > (1 - spare) * self._capacity:
            return None
        row.number = self._number(request_id)
        self.rows.append(row)
        self._held[request_id] = row
        return 0

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Tell whether as much was promised: no promise is made larger."""
        return num_tokens <= self._held[request_id].prompt + self._held[request_id].output

    def slots(self, table: BlockTable) -> int:
        """Return how many columns every row has."""
        return self.rectangle.capacity

    def _free(self, request_id: str, table: BlockTable) -> None:
        row = self._held.pop(request_id)
        row.live = False
        if not self._static or row.place is None:
            self.rows.remove(row)
        if not self._held:
            self.rows.clear()
            self.rectangle.drop()

    def arrange(self) -> None:
        """Let rows that wait join and rows that left go: one new rectangle, left-padded."""
        if len(self.rows) == self.rectangle.rows and all(r.place is not None for r in self.rows):
            return
        end = max(row.end for row in self.rows)
        old = [(row.place, row.pad) for row in self.rows]
        for place, row in enumerate(self.rows):
            row.pad, row.place = end - (row.end - row.pad), place
        least = min(row.pad for row in self.rows)
        for row in self.rows:
            row.pad -= least
        self._move(end - least, old)

    def widen(self, end: int) -> None:
        """Take a rectangle of more columns if it has fewer than ``end``."""
        if end > self.rectangle.capacity:
            self._move(end, [(row.place, row.pad) for row in self.rows])

    def _move(self, columns: int, old: list[tuple[int | None, int]]) -> None:
        spans = [
            TokenMove(place, pad, index, row.pad, row.length)
            for index, ((place, pad), row) in enumerate(zip(old, self.rows, strict=True))
            if place is not None and row.length
        ]
        self.rectangle.move(len(self.rows), round_up_to_step(columns), spans)

    def lingering_requests(self) -> list[str]:
        """Return the requests that ended but whose rows stay until their batch ends."""
        return [row.request_id for row in self.rows if not row.live]

    def check(self, running: set[str]) -> None:
        """Check the rows and the record of bytes held too; see ``KVCacheManager.check``."""
        super().check(running)
        live = [row.number for row in self.rows if row.live]
        if sorted(live) != sorted(row.number for row in self._held.values()):
            raise AssertionError("a live row belongs to no request")
        if len(live) < len(self.rows) and not (self._static and live):
            raise AssertionError("a row is kept although its request has ended")
        if self.accounts.held != self.rectangle.nbytes:
            raise AssertionError("the record of bytes held disagrees with the rectangle")

    def counters(self) -> dict[str, float]:
        """Return bytes held, used and copied, and the padding that attention read over."""
        waste = 100 * self.empty_columns / self.columns if self.columns else 0.0
        return {**super().counters(), "padding.waste_pct": waste}

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held."""
        super().reset_counters()
        self.columns = self.empty_columns = 0


class PaddedMemory:
    """The rectangle; see ``KVMemory``."""

    def __init__(self, cache: PaddedKVCacheManager) -> None:
        self.attention = SdpaAttention()
        self._cache = cache

    def plan(self, batch: Batch) -> tuple[Batch, StepAttention]:
        """Arrange the rows, pad the step's chunks to the longest, add rows that only stay."""
        cache = self._cache
        cache.arrange()
        rows = {row.number: row for row in cache.rows}
        taking = [rows[int(number)] for number in batch.block_tables[:, 0]]
        contexts = list(zip(taking, batch.seq_lens.tolist(), strict=True))
        cache.widen(max(row.pad + context for row, context in contexts))
        for row, context in contexts:
            row.length = context
        staying = [row for row in cache.rows if not row.live]
        computed, step = pad_batch(batch, taking, staying, cache.rectangle)
        cache.columns += step.columns
        cache.empty_columns += step.empty_columns
        return computed, StepAttention(self.attention, step, {"layout.padded": 1})
