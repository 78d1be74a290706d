"""What is asked of the engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

from labkit.config.choices import CacheState, Precision
from labkit.config.rules import require


class WorkloadKind(Enum):
    """What the engine is given: attention cases, or requests."""

    kernel = "kernel"
    ragged = "ragged"
    uniform = "uniform"
    case_study = "case_study"
    waste = "waste"
    chat = "chat"
    agent = "agent"


class State(Enum):
    """What the caches hold when a launch is measured.

    hot: what the same arm's launch just before left there. cold: nothing of it, because
    more memory than they hold was read in between. both: every case is two rows.
    """

    hot = "hot"
    cold = "cold"
    both = "both"


@dataclass
class Case:
    """One row of a kernel workload.

    ``decode`` requests of one query token over ``context`` tokens each, and
    ``prefill`` requests of ``chunk`` query tokens each, after ``past`` tokens that are
    cached already. Short dispatches need more timings: the case is timed
    ``workload.repeats`` x ``factor`` times.
    """

    name: str = ""
    decode: int = 0
    context: int = 0
    prefill: int = 0
    chunk: int = 0
    past: int = 0
    factor: int = 1

    def __post_init__(self) -> None:
        """Check that the case has work and says how much."""
        where = f"workload.cases: case {self.name!r}"
        require(bool(self.name), "workload.cases: every case needs a name")
        numbers = (self.decode, self.context, self.prefill, self.chunk, self.past)
        require(min(numbers) >= 0, f"{where}: negative")
        require(self.decode + self.prefill > 0, f"{where}: no requests (decode or prefill)")
        require((self.decode > 0) == (self.context > 0), f"{where}: decode goes with context")
        require((self.prefill > 0) == (self.chunk > 0), f"{where}: prefill goes with chunk")
        require(self.prefill > 0 or self.past == 0, f"{where}: past goes with prefill")
        require(1 <= self.factor <= 1000, f"{where}: factor={self.factor}: allowed are 1 to 1000")


@dataclass
class Workload:
    """What is asked of the engine.

    Kernel workloads: ``cases``, the head counts, ``window`` (keys that a query sees; null:
    all), ``dtype`` (of queries, keys and values), ``state`` (of the caches),
    ``max_pool_bytes``.
    Request workloads: ``num_requests``, ``concurrency`` (requests in flight, closed
    loop), ``stagger_ms`` (each of these clients begins so many milliseconds after the one
    before), ``ignore_eos`` (fixed output lengths), ``cache_state`` (of the prefix cache)
    and the sampling parameters.
    ``warmup`` and ``repeats`` are counts of kernel launches per case (at least ``warmup``
    before the first one that counts); request workloads warm up with ``warmup`` requests.
    """

    name: str = "chat"
    kind: WorkloadKind = WorkloadKind.chat
    warmup: int = 2
    repeats: int = 1
    # requests
    num_requests: int | None = None
    concurrency: int = 16
    stagger_ms: float = 0.0
    ignore_eos: bool = True
    cache_state: CacheState = CacheState.cold
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    # kernel cases
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 128
    window: int | None = None
    dtype: Precision = Precision.float32
    state: State = State.hot
    max_pool_bytes: int = 1 << 30
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the ranges, and that nothing is set that this kind does not read."""
        require(self.warmup >= 0, f"workload.warmup={self.warmup}: allowed are 0 or more")
        require(
            1 <= self.repeats <= 100_000,
            f"workload.repeats={self.repeats}: allowed are 1 to 100000",
        )
        if self.kind is WorkloadKind.kernel:
            self._check_kernel()
        else:
            self._check_requests()

    def _check_kernel(self) -> None:
        require(bool(self.cases), f"workload={self.name}: workload.cases is empty")
        names = [case.name for case in self.cases]
        require(len(set(names)) == len(names), "workload.cases: two cases have the same name")
        require(
            self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
            f"workload.num_heads={self.num_heads} is not a multiple of "
            f"workload.num_kv_heads={self.num_kv_heads}",
        )
        require(
            16 <= self.head_dim <= 256 and self.head_dim % 16 == 0,
            f"workload.head_dim={self.head_dim}: allowed are multiples of 16 from 16 to 256",
        )
        require(
            self.window is None or self.window >= 1,
            f"workload.window={self.window}: allowed are 1 or more (keys), or null",
        )
        require(
            self.max_pool_bytes >= 1 << 20,
            f"workload.max_pool_bytes={self.max_pool_bytes}: allowed are 1048576 or more",
        )
        self._unread(
            "kernel",
            "num_requests",
            "concurrency",
            "stagger_ms",
            "ignore_eos",
            "cache_state",
            "temperature",
            "top_k",
            "top_p",
        )

    def _check_requests(self) -> None:
        require(
            self.num_requests is None or self.num_requests >= 1,
            f"workload.num_requests={self.num_requests}: allowed are 1 or more, or null for all",
        )
        require(
            1 <= self.concurrency <= 4096,
            f"workload.concurrency={self.concurrency}: allowed are 1 to 4096",
        )
        require(
            0 <= self.stagger_ms <= 60_000,
            f"workload.stagger_ms={self.stagger_ms}: allowed are 0 to 60000 (milliseconds)",
        )
        require(
            self.temperature >= 0, f"workload.temperature={self.temperature}: allowed are 0 or more"
        )
        require(self.top_k >= 0, f"workload.top_k={self.top_k}: allowed are 0 (off) or more")
        require(0 < self.top_p <= 1, f"workload.top_p={self.top_p}: allowed are above 0, at most 1")
        require(self.repeats == 1, f"workload.repeats={self.repeats}: requests are measured once")
        self._unread(
            "request",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "window",
            "dtype",
            "state",
            "max_pool_bytes",
            "cases",
        )

    def _unread(self, kind: str, *names: str) -> None:
        defaults = {item.name: item for item in dataclasses.fields(self)}
        for name in names:
            value = getattr(self, name)
            factory = defaults[name].default_factory
            default = factory() if factory is not dataclasses.MISSING else defaults[name].default
            require(
                value == default,
                f"workload.{name}={value}: a {kind} workload ({self.name}) does not read it",
            )
