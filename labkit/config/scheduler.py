"""Who runs in a step."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.choices import Admission, ChunkPolicy, Composition, Order, Queue, Reservation
from labkit.config.rules import require

# What engine.scheduler.reservation=optimistic takes where watermark is null, as vLLM does.
DEFAULT_WATERMARK = 0.01


@dataclass
class Scheduler:
    """Who runs in a step: admission, queue, order, budget (tokens) and caps.

    ``chunk``: at most this many prompt tokens of one request per step; null: no cap
    besides ``max_num_batched_tokens``. ``watermark``: the share of KV blocks that an
    optimistic admission leaves free; null: 0.01.
    """

    admission: Admission = Admission.continuous
    order: Order = Order.decode_first
    composition: Composition = Composition.mixed
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    chunk: int | None = None
    chunk_policy: ChunkPolicy = ChunkPolicy.static
    reservation: Reservation = Reservation.full
    watermark: float | None = None
    queue: Queue = Queue.fcfs

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            1 <= self.max_num_seqs <= 4096,
            f"engine.scheduler.max_num_seqs={self.max_num_seqs}: allowed are 1 to 4096",
        )
        require(
            self.max_num_seqs <= self.max_num_batched_tokens <= 1 << 20,
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}: must be at "
            f"least engine.scheduler.max_num_seqs={self.max_num_seqs} (one token each), "
            "at most 1048576",
        )
        require(
            self.chunk is None or 1 <= self.chunk <= self.max_num_batched_tokens,
            f"engine.scheduler.chunk={self.chunk}: allowed are 1 to "
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}, or null",
        )
        require(
            self.admission is not Admission.static or self.order is Order.prefill_first,
            "engine.scheduler.admission=static: a batch begins with its prompts, so that "
            "engine.scheduler.order=decode_first has nothing to order; set prefill_first",
        )
        self._check_shrinking()
        self._check_reservation()

    def _check_shrinking(self) -> None:
        if self.chunk_policy is ChunkPolicy.static:
            return
        where = "engine.scheduler.chunk_policy=shrinking"
        require(
            self.chunk is not None and self.chunk >= self.max_num_seqs,
            f"{where}: takes a token of the chunk per decode; set engine.scheduler.chunk to "
            f"engine.scheduler.max_num_seqs={self.max_num_seqs} or more",
        )
        require(
            self.composition is Composition.mixed,
            f"{where}: a prefill step of engine.scheduler.composition=split has no decodes to "
            "shrink for; set mixed, or static",
        )

    def _check_reservation(self) -> None:
        if self.reservation is Reservation.full:
            require(
                self.watermark is None,
                f"engine.scheduler.watermark={self.watermark}: engine.scheduler.reservation=full "
                "never preempts and does not read it; set optimistic, or leave it null",
            )
            return
        require(
            self.watermark is None or 0 <= self.watermark <= 0.5,
            f"engine.scheduler.watermark={self.watermark}: allowed are 0 to 0.5 (share of the "
            "blocks), or null",
        )
        require(
            self.admission is Admission.continuous,
            "engine.scheduler.reservation=optimistic: a static batch runs whole to its end and "
            "may lose no request; set engine.scheduler.admission=continuous, or full",
        )
