"""What is asked of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from labkit.config.attention import Precision
from labkit.config.option import OWN_CLASS, Group, ReadBy, option, require
from labkit.config.request_mix import TIMED, ArrivalKind, Arrivals, Limits, Prompts
from labkit.config.video import Clip, Decoder, Picks


class State(Enum):
    """What the caches hold when a launch is measured.

    hot: what the same arm's launch just before left there. cold: nothing of it, because
    more memory than they hold was read in between. both: every case is two rows.
    """

    hot = "hot"
    cold = "cold"
    both = "both"


class CacheState(Enum):
    """What the prefix cache holds when measuring begins.

    cold: nothing. warm: what it keeps after all requests were served once, unmeasured.
    """

    cold = "cold"
    warm = "warm"


@dataclass
class Case(Group, place="workload.cases"):
    """One row of a kernel workload: requests that decode, that prefill, or of any lengths."""

    name: str = option("", "What its row is called.")
    decode: int = option(0, "Requests of one query token.", least=0)
    context: int = option(0, "Tokens that each of them attends to.", least=0, unit="tokens")
    prefill: int = option(0, "Requests with a chunk of their prompt.", least=0)
    chunk: int = option(0, "Query tokens of each of them.", least=0, unit="tokens")
    past: int = option(0, "Tokens of each of them that are cached already.", least=0, unit="tokens")
    uneven: list[list[int]] = option(
        factory=list,
        meaning="Requests of lengths of their own, behind those: [query tokens, tokens cached "
        "before them].",
    )
    factor: int = option(
        1, "Short dispatches need more: workload.repeats times so many.", least=1, most=1000
    )

    def __post_init__(self) -> None:
        """Check that the case has work and says how much."""
        require(bool(self.name), "workload.cases: every case needs a name")
        super().__post_init__()
        where = f"workload.cases: case {self.name!r}"
        requests = self.decode + self.prefill + len(self.uneven)
        require(requests > 0, f"{where}: no requests (decode, prefill or uneven)")
        require((self.decode > 0) == (self.context > 0), f"{where}: decode goes with context")
        require((self.prefill > 0) == (self.chunk > 0), f"{where}: prefill goes with chunk")
        require(self.prefill > 0 or self.past == 0, f"{where}: past goes with prefill")
        for lengths in self.uneven:
            require(
                len(lengths) == 2 and lengths[0] > 0 and lengths[1] >= 0,
                f"{where}: uneven: {lengths} is not [query tokens, tokens cached before them]",
            )

    @property
    def prefills(self) -> bool:
        """Whether a request has more than one query token, or may have."""
        return self.prefill > 0 or any(queries > 1 for queries, _ in self.uneven)

    def key(self, name: str) -> str:
        """Name the case in error lines."""
        return f"workload.cases: case {self.name!r}: {name}"


KIND = "workload.kind"
KERNEL = ReadBy(KIND, ("kernel",))
REQUESTS = ReadBy(KIND, ("requests", "headroom", OWN_CLASS))
VIDEO = ReadBy(KIND, ("video",))
REPEATED = ReadBy(KIND, ("kernel", "video"))
IN_FLIGHT = ReadBy(KIND, ("requests", "headroom", "video", OWN_CLASS))


@dataclass
class Workload(Group, place="workload"):
    """What is asked of the engine."""

    name: str = option("chat", "What reports call it.")
    kind: str = option(
        "requests",
        "What is asked: attention cases or requests of an engine, or clips of a video decoder; "
        "headroom: nothing, an engine's memory is planned.",
        words=("kernel", "requests", "headroom", "video"),
        own_class=True,
    )
    warmup: int = option(
        2,
        "Unmeasured beforehand: launches of each case at least, or requests (of a video workload: "
        "of its shortest clip).",
        least=0,
    )
    repeats: int = option(
        1,
        "Launches of each case that count, or requests of each clip.",
        least=1,
        most=100_000,
        read_by=REPEATED,
    )
    prompts: Prompts = field(default_factory=Prompts)
    arrivals: Arrivals = field(default_factory=Arrivals)
    limits: Limits = field(default_factory=Limits)
    num_requests: int | None = option(
        None, "Requests, from the first.", least=1, null="all", read_by=REQUESTS
    )
    concurrency: int | None = option(
        16,
        "Requests in flight at most; in a closed loop so many clients; null: any.",
        least=1,
        most=4096,
        read_by=IN_FLIGHT,
    )
    stagger_ms: float = option(
        0.0,
        "How much later each client begins than the one before.",
        least=0,
        most=60_000,
        unit="milliseconds",
        read_by=REQUESTS,
    )
    per_request: bool = option(
        False, "Every request is a case of its own too, named by its text.", read_by=REQUESTS
    )
    ignore_eos: bool = option(
        True, "Outputs have their full length, whatever is sampled.", read_by=REQUESTS
    )
    cache_state: CacheState = option(CacheState.cold, read_by=REQUESTS)
    temperature: float = option(0.0, "Of sampling; 0: greedy.", least=0, read_by=REQUESTS)
    top_k: int = option(
        0, "The likeliest tokens to sample from; 0: all.", least=0, read_by=REQUESTS
    )
    top_p: float = option(
        1.0, "The share of probability to sample from.", above=0, most=1, read_by=REQUESTS
    )
    num_heads: int = option(16, "Query heads.", least=1, read_by=KERNEL)
    num_kv_heads: int = option(4, "Key/value heads.", least=1, read_by=KERNEL)
    head_dim: int = option(
        128, "The width of a head.", least=16, most=256, multiple_of=16, read_by=KERNEL
    )
    window: int | None = option(
        None, "Keys that a query sees.", least=1, unit="keys", null="all", read_by=KERNEL
    )
    dtype: Precision = option(
        Precision.float32, "The type of queries, keys and values.", read_by=KERNEL
    )
    state: State = option(State.hot, read_by=KERNEL)
    max_pool_bytes: int = option(
        1 << 30,
        "A case whose KV pool needs more is skipped.",
        least=1 << 20,
        unit="bytes",
        read_by=KERNEL,
    )
    cases: list[Case] = option(factory=list, meaning="The rows.", read_by=KERNEL)
    made: list[Clip] = option(factory=list, meaning="Clips that are synthesised.", read_by=VIDEO)
    clips: str | None = option(
        None, "A folder of your own clips.", null="those that are made", read_by=VIDEO
    )
    frames: int = option(
        16, "Frames to pick of a clip.", least=1, most=4096, unit="frames", read_by=VIDEO
    )
    picks: Picks = option(Picks.stream, read_by=VIDEO)
    decoder: Decoder = option(Decoder.pyav, read_by=VIDEO)
    decoder_threads: int = option(
        1, "Of each request's decoder.", least=1, most=64, unit="threads", read_by=VIDEO
    )
    questions: str | None = option(
        None,
        "Questions about your own clips, as lines of JSON (docs/video.md); a model answers them "
        "from the picked frames.",
        null="none",
        read_by=VIDEO,
    )
    vlm: str | None = option(
        None,
        "Who answers: a directory or hub id that mlx-vlm can load.",
        null="nobody",
        read_by=VIDEO,
    )

    def __post_init__(self) -> None:
        """Check what spans options."""
        super().__post_init__()
        if self.serves:
            self._check_arrivals()
            return
        for name in ("prompts", "arrivals", "limits"):
            group = getattr(self, name)
            require(
                group == type(group)(),
                f"workload.{name}: {KIND}={self.kind} does not read it; it is for {REQUESTS}",
            )
        if self.times_kernels:
            self._check_kernel()
        else:
            self._check_video()

    @property
    def times_kernels(self) -> bool:
        """Whether attention alone is timed, and nothing served."""
        return self.kind in KERNEL

    @property
    def serves(self) -> bool:
        """Whether a model serves requests."""
        return self.kind in REQUESTS

    @property
    def has_engine(self) -> bool:
        """Whether an engine is asked, or a part of one."""
        return self.kind not in VIDEO

    def _check_video(self) -> None:
        require(
            bool(self.made) or self.clips is not None,
            f"workload={self.name}: workload.made is empty; set workload.clips=DIR",
        )
        names = [clip.name for clip in self.made]
        require(len(set(names)) == len(names), "workload.made: two clips have the same name")
        require(
            self.decoder is Decoder.pyav or self.picks is Picks.stream,
            f"workload.decoder=opencv: it can only stream; workload.picks={self.picks.value} needs "
            "workload.decoder=pyav",
        )
        require(
            self.questions is None or self.clips is not None,
            f"workload.questions={self.questions}: questions are about clips of your own; set "
            "workload.clips=DIR",
        )
        require(
            (self.questions is None) == (self.vlm is None),
            "workload.questions and workload.vlm go together: who asks needs a model that answers",
        )

    def _check_kernel(self) -> None:
        require(bool(self.cases), f"workload={self.name}: workload.cases is empty")
        names = [case.name for case in self.cases]
        require(len(set(names)) == len(names), "workload.cases: two cases have the same name")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"workload.num_heads={self.num_heads} is not a multiple of "
            f"workload.num_kv_heads={self.num_kv_heads}",
        )

    def _check_arrivals(self) -> None:
        arrivals = self.arrivals.kind
        closed = arrivals is ArrivalKind.closed
        require(
            self.concurrency is not None or not closed,
            "workload.concurrency=null: workload.arrivals.kind=closed needs a number of clients",
        )
        require(
            self.stagger_ms == 0 or closed,
            f"workload.stagger_ms={self.stagger_ms}: workload.arrivals.kind={arrivals.value} does "
            "not read it; only the clients of a closed loop join one after the other",
        )
        require(
            arrivals is not ArrivalKind.trace or self.prompts.source in TIMED,
            f"workload.arrivals.kind=trace: workload.prompts.source={self.prompts.source} has no "
            f"timestamps; {', '.join(TIMED)} may have",
        )
