"""The scheduler: which requests run in a step, and with how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option, require

QUEUES = ("fcfs", "priority")
# Used for engine.scheduler.watermark=null with reservation=optimistic, as in vLLM.
DEFAULT_WATERMARK = 0.01


class Admission(Enum):
    """When waiting requests join the batch.

    continuous: at any step. static: only when no request is running.
    """

    continuous = "continuous"
    static = "static"


class Order(Enum):
    """Order in which decodes and prefills use a step's token budget."""

    decode_first = "decode_first"
    prefill_first = "prefill_first"


class Composition(Enum):
    """Whether prefills and decodes share a step (mixed) or get separate steps (split)."""

    mixed = "mixed"
    split = "split"


class ChunkPolicy(Enum):
    """Size of prefill chunks. shrinking: one token smaller for every decoding request."""

    static = "static"
    shrinking = "shrinking"


class Reservation(Enum):
    """KV blocks that are reserved when a request is admitted.

    full: for the prompt and all output tokens. optimistic: only for the prompt.
    """

    full = "full"
    optimistic = "optimistic"


@dataclass
class Scheduler(Group, place="engine.scheduler"):
    """The scheduler: admission, order, token budget and chunked prefill."""

    admission: Admission = option(Admission.continuous)
    order: Order = option(Order.decode_first)
    composition: Composition = option(Composition.mixed)
    max_num_seqs: int = option(
        16, "Maximum number of running requests.", ge=1, le=4096, mlx_lm=True
    )
    max_num_batched_tokens: int = option(
        512, "Token budget of a step.", ge=1, le=1 << 20, unit="tokens"
    )
    chunk: int | None = option(
        None,
        "Prefill chunk: maximum prompt tokens of one request in a step.",
        ge=1,
        unit="tokens",
        null_means="no cap besides max_num_batched_tokens; 2048 with engine=mlx_lm",
        mlx_lm=True,
    )
    chunk_policy: ChunkPolicy = option(ChunkPolicy.static)
    prefill_cap: int | None = option(
        None,
        "Maximum prompt tokens of a step over all requests, not counting decodes.",
        ge=1,
        unit="tokens",
        null_means="the rest of max_num_batched_tokens",
    )
    prefill_floor: int | None = option(
        None,
        "Prompt tokens that every step can hold, however many requests decode, even beyond "
        "max_num_batched_tokens.",
        ge=1,
        unit="tokens",
        null_means="the rest of max_num_batched_tokens",
        read_by=ReadBy("engine.scheduler.order", (Order.decode_first,)),
    )
    reservation: Reservation = option(Reservation.full)
    watermark: float | None = option(
        None,
        "Share of the KV blocks that an admission must leave free.",
        ge=0,
        le=0.5,
        unit="share of the blocks",
        null_means=f"{DEFAULT_WATERMARK}",
        read_by=ReadBy("engine.scheduler.reservation", (Reservation.optimistic,)),
    )
    queue: str = option(
        "fcfs",
        "Order of waiting requests; of the running ones the last in it is preempted first. "
        "priority: by the number that a server's client or LLM gives a request (docs/server.md), "
        "so a study refuses it. A class of your own may also hold requests back, choose whom to "
        "preempt, and order the phases of a step (docs/extending.md).",
        choices=QUEUES,
        class_path=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.admission is not Admission.static or self.order is Order.prefill_first,
            "engine.scheduler.admission=static: a static batch prefills first; set "
            "engine.scheduler.order=prefill_first",
        )
        require(
            self.reservation is Reservation.full or self.admission is Admission.continuous,
            "engine.scheduler.reservation=optimistic: a static batch cannot preempt a request; set "
            "engine.scheduler.admission=continuous or engine.scheduler.reservation=full",
        )
        if self.chunk_policy is ChunkPolicy.shrinking:
            self._check_shrinking()
        if self.prefill_floor is not None:
            self._check_floor(self.prefill_floor)

    def check_step_tokens(self) -> None:
        """Check what ``max_num_batched_tokens`` limits; engines of others have no such limit."""
        require(
            self.max_num_seqs <= self.max_num_batched_tokens,
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}: must be at "
            f"least engine.scheduler.max_num_seqs={self.max_num_seqs} (one token each)",
        )
        require(
            self.chunk is None or self.chunk <= self.max_num_batched_tokens,
            f"engine.scheduler.chunk={self.chunk}: must be 1 to "
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}, or null",
        )

    @property
    def takes_priorities(self) -> bool:
        """Whether the queue may read the requests' priorities, as a user's class may."""
        return self.queue != "fcfs"

    @property
    def max_step_tokens(self) -> int:
        """The largest number of tokens that a step may have."""
        beside_decodes = self.max_num_seqs - 1 + (self.prefill_floor or 0)
        return max(self.max_num_batched_tokens, beside_decodes)

    def _check_floor(self, floor: int) -> None:
        where = f"engine.scheduler.prefill_floor={floor}"
        require(
            self.composition is Composition.mixed,
            f"{where}: prompts have their own steps under engine.scheduler.composition=split; set "
            "engine.scheduler.composition=mixed, or leave it null",
        )
        limit = min(self.prefill_cap or self.max_num_batched_tokens, self.max_num_batched_tokens)
        require(
            floor <= limit,
            f"{where}: must be at most {limit}, the smaller of "
            "engine.scheduler.max_num_batched_tokens and engine.scheduler.prefill_cap",
        )

    def _check_shrinking(self) -> None:
        where = "engine.scheduler.chunk_policy=shrinking"
        require(
            self.chunk is not None and self.chunk >= self.max_num_seqs,
            f"{where}: every decode takes one token off the chunk; set engine.scheduler.chunk to "
            f"engine.scheduler.max_num_seqs={self.max_num_seqs} or more",
        )
        require(
            self.composition is Composition.mixed,
            f"{where}: under engine.scheduler.composition=split a prefill step has no decodes; set "
            "engine.scheduler.composition=mixed or engine.scheduler.chunk_policy=static",
        )
