"""Who runs in a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option, require

# What engine.scheduler.reservation=optimistic takes where watermark is null, as vLLM does.
DEFAULT_WATERMARK = 0.01


class Admission(Enum):
    """When waiting requests may join: at any step, or only when none runs."""

    continuous = "continuous"
    static = "static"


class Order(Enum):
    """Whose tokens come first in a step's budget."""

    decode_first = "decode_first"
    prefill_first = "prefill_first"


class Composition(Enum):
    """Whether prefill and decode share a step."""

    mixed = "mixed"
    split = "split"


class ChunkPolicy(Enum):
    """Whether the cap on a request's chunk shrinks with the decode load."""

    static = "static"
    shrinking = "shrinking"


class Reservation(Enum):
    """How many KV blocks a request must find free to be admitted."""

    full = "full"
    optimistic = "optimistic"


class Queue(Enum):
    """Who is served before whom."""

    fcfs = "fcfs"
    priority = "priority"


@dataclass
class Scheduler(Group, place="engine.scheduler"):
    """Who runs in a step: admission, queue, order, budget of tokens, and caps."""

    admission: Admission = option(Admission.continuous)
    order: Order = option(Order.decode_first)
    composition: Composition = option(Composition.mixed)
    max_num_seqs: int = option(
        16, "Requests that run at a time, at most.", least=1, most=4096, mlx_lm=True
    )
    max_num_batched_tokens: int = option(
        512, "Tokens of a step, at most.", least=1, most=1 << 20, unit="tokens"
    )
    chunk: int | None = option(
        None,
        "Prompt tokens of one request in a step, at most.",
        least=1,
        unit="tokens",
        null="no cap besides max_num_batched_tokens",
        mlx_lm=True,
    )
    chunk_policy: ChunkPolicy = option(ChunkPolicy.static)
    prefill_cap: int | None = option(
        None,
        "Prompt tokens of a step in all, at most; decodes do not count.",
        least=1,
        unit="tokens",
        null="what max_num_batched_tokens leaves",
    )
    prefill_floor: int | None = option(
        None,
        "Prompt tokens that a step has room for however many requests decode, if need be beyond "
        "max_num_batched_tokens.",
        least=1,
        unit="tokens",
        null="what max_num_batched_tokens leaves",
        read_by=ReadBy("engine.scheduler.order", (Order.decode_first,)),
    )
    reservation: Reservation = option(Reservation.full)
    watermark: float | None = option(
        None,
        "The share of the KV blocks that an admission leaves free.",
        least=0,
        most=0.5,
        unit="share of the blocks",
        null=f"{DEFAULT_WATERMARK}",
        read_by=ReadBy("engine.scheduler.reservation", (Reservation.optimistic,)),
    )
    queue: Queue = option(Queue.fcfs)

    def __post_init__(self) -> None:
        """Check what spans options."""
        super().__post_init__()
        require(
            self.max_num_seqs <= self.max_num_batched_tokens,
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}: must be at "
            f"least engine.scheduler.max_num_seqs={self.max_num_seqs} (one token each)",
        )
        require(
            self.chunk is None or self.chunk <= self.max_num_batched_tokens,
            f"engine.scheduler.chunk={self.chunk}: allowed are 1 to "
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}, or null",
        )
        require(
            self.admission is not Admission.static or self.order is Order.prefill_first,
            "engine.scheduler.admission=static: a batch begins with its prompts, so that "
            "engine.scheduler.order=decode_first has nothing to order; set prefill_first",
        )
        require(
            self.reservation is Reservation.full or self.admission is Admission.continuous,
            "engine.scheduler.reservation=optimistic: a static batch runs whole to its end and "
            "may lose no request; set engine.scheduler.admission=continuous, or full",
        )
        if self.chunk_policy is ChunkPolicy.shrinking:
            self._check_shrinking()
        if self.prefill_floor is not None:
            self._check_floor(self.prefill_floor)

    @property
    def most_step_tokens(self) -> int:
        """Tokens of the largest step that there can be."""
        beside_decodes = self.max_num_seqs - 1 + (self.prefill_floor or 0)
        return max(self.max_num_batched_tokens, beside_decodes)

    def _check_floor(self, floor: int) -> None:
        where = f"engine.scheduler.prefill_floor={floor}"
        require(
            self.composition is Composition.mixed,
            f"{where}: prompts have steps of their own under engine.scheduler.composition=split; "
            "set mixed, or null",
        )
        most = min(self.prefill_cap or self.max_num_batched_tokens, self.max_num_batched_tokens)
        require(
            floor <= most,
            f"{where}: must be at most engine.scheduler.max_num_batched_tokens and prefill_cap: "
            f"{most}",
        )

    def _check_shrinking(self) -> None:
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
