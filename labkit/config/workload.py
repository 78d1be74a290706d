"""The workload: requests, attention batches or video clips, and their options."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from labkit.config.engine.kv_cache import Precision
from labkit.config.option import CLASS_PATH, Group, ReadBy, is_class_path, option, require
from labkit.config.requests import (
    MAX_LENGTH_TOKENS,
    MAX_REQUESTS,
    TIMESTAMPED_SOURCES,
    ArrivalKind,
    Arrivals,
    LatencySLO,
    Prompts,
)
from labkit.config.video import Clip, Decoder, FramePicks


class State(Enum):
    """State of the CPU caches when a kernel launch is measured.

    hot: as the same arm's previous launch left them. warm: as another arm's launch left them, for
    arms that read the same memory. cold: flushed by reading more memory than they hold. both: every
    case gets two rows, hot and cold.
    """

    hot = "hot"
    warm = "warm"
    cold = "cold"
    both = "both"


class CacheState(Enum):
    """State of the prefix cache when measuring begins.

    cold: empty. warm: all requests have been served once before, unmeasured.
    """

    cold = "cold"
    warm = "warm"


case_number_option = partial(option, 0, ge=0, le=MAX_REQUESTS)
case_length_option = partial(option, 0, ge=0, le=MAX_LENGTH_TOKENS, unit="tokens")


@dataclass
class Case(Group, place="workload.cases"):
    """A batch of a kernel workload: decodes, prefill chunks, and requests with given lengths."""

    name: str = option("", "Name of the case in reports.")
    decode: int = case_number_option("Decoding requests (one query token each).")
    context: int = case_length_option("Context length of each decoding request.")
    prefill: int = case_number_option("Requests that prefill a chunk of their prompt.")
    chunk: int = case_length_option("Query tokens of each prefilling request.")
    past: int = case_length_option("Cached tokens of each prefilling request before its chunk.")
    uneven: list[list[int]] = option(
        factory=list,
        meaning="Further requests with their own lengths: [query tokens, cached tokens before "
        f"them], at most {MAX_LENGTH_TOKENS} each.",
    )
    factor: int = option(
        1, "Factor on workload.repeats, for cases with short dispatches.", ge=1, le=100_000
    )

    def __post_init__(self) -> None:
        require(bool(self.name), "workload.cases: every case needs a name")
        super().__post_init__()
        where = f"workload.cases: case {self.name!r}"
        requests = self.decode + self.prefill + len(self.uneven)
        require(requests > 0, f"{where} has no requests; set decode, prefill or uneven")
        require(
            (self.decode > 0) == (self.context > 0),
            f"{where}: decode and context go together; set both or neither",
        )
        require(
            (self.prefill > 0) == (self.chunk > 0),
            f"{where}: prefill and chunk go together; set both or neither",
        )
        require(
            self.prefill > 0 or self.past == 0,
            f"{where}: past needs prefill; set prefill or leave past=0",
        )
        for lengths in self.uneven:
            require(
                len(lengths) == 2 and 0 < lengths[0] <= MAX_LENGTH_TOKENS >= lengths[1] >= 0,
                f"{where}: uneven: {lengths} must be [query tokens, cached tokens before them], at "
                f"most {MAX_LENGTH_TOKENS} each",
            )

    @property
    def prefills(self) -> bool:
        """Whether a request may have more than one query token."""
        return self.prefill > 0 or any(queries > 1 for queries, _ in self.uneven)

    def key(self, name: str) -> str:
        """Return an option's key for error messages; it includes the case's name."""
        return f"workload.cases: case {self.name!r}: {name}"


MAX_TRACED_STEPS = 10_000
KIND = "workload.kind"
KERNEL = ReadBy(KIND, ("kernel",))
REQUESTS = ReadBy(KIND, ("requests", "headroom", CLASS_PATH))
SERVED = ReadBy(KIND, ("requests", CLASS_PATH))
VIDEO = ReadBy(KIND, ("video",))
SCORING = ReadBy(KIND, ("scoring",))
REPEATED = ReadBy(KIND, ("kernel", "video"))
IN_FLIGHT = ReadBy(KIND, ("requests", "headroom", "video", "scoring", CLASS_PATH))
request_option = partial(option, read_by=SERVED)
kernel_option = partial(option, read_by=KERNEL)
video_option = partial(option, read_by=VIDEO)
scoring_option = partial(option, read_by=SCORING)


PRIMARY_METRICS = {
    "kernel": "dispatch_us",
    "video": "decode_ms",
    "headroom": "taken_pct",
    "scoring": "total_tok_s",
}


@dataclass
class Workload(Group, place="workload"):
    """The workload: its kind, load, sampling and cases."""

    name: str = option("chat", "Name in reports.")
    kind: str = option(
        "requests",
        "Kind of workload: attention batches (kernel), requests to an engine (requests), a memory "
        "plan without serving (headroom), video decoding (video), log probabilities of given texts "
        "(scoring), or a class of your own.",
        choices=("kernel", "requests", "headroom", "video", "scoring"),
        class_path=True,
    )
    warmup: int = option(
        2,
        "Amount of unmeasured warm-up: the minimum launches per case (kernel), the windows "
        "(scoring), the requests for the smallest clip file (video), or the requests (other "
        "kinds).",
        ge=0,
    )
    repeats: int | None = option(
        1,
        "Measured launches per case, or requests per clip. null: as many launches as design.time "
        "allows.",
        ge=1,
        le=100_000,
        read_by=REPEATED,
    )
    prompts: Prompts = field(default_factory=Prompts)
    arrivals: Arrivals = field(default_factory=Arrivals)
    limits: LatencySLO = field(default_factory=LatencySLO)
    capacity: float | None = request_option(
        None,
        "Percentage of requests that must meet workload.limits; a sweep of workload.arrivals.rate "
        "then reports the highest rate that keeps it (docs/sweeps.md).",
        gt=0,
        le=99.99,
        unit="percent",
        null_means="not reported",
    )
    num_requests: int | None = option(
        None,
        "Number of requests to serve, from the first. 0: as many as design.time allows, at most "
        "all; all if the command sets design.blocks, if each is a row, if they arrive at once or "
        "from a trace, or if workload.kind is not requests.",
        ge=0,
        null_means="all",
        read_by=REQUESTS,
    )
    concurrency: int | None = option(
        16,
        "Maximum requests in flight (in a closed loop, the number of clients; in a scoring "
        "workload, the windows of a round); null: no limit, which arrivals at a rate or from a "
        "trace require.",
        ge=1,
        le=4096,
        read_by=IN_FLIGHT,
    )
    stagger_ms: float = request_option(
        0.0,
        "Delay of each client's start after the previous client's.",
        ge=0,
        le=60_000,
        unit="milliseconds",
    )
    per_request: bool = request_option(
        False, "Report every request as its own case, named by its text."
    )
    step_trace: int | None = request_option(
        None,
        "Engine steps that every run traces: chunks, KV blocks and times. The runs of the first "
        "block store their traces, for python -m labkit.trace (docs/steps.md).",
        ge=1,
        le=MAX_TRACED_STEPS,
        unit="steps",
        null_means="none",
    )
    ignore_eos: bool = request_option(
        True, "Generate the full output length past the end-of-sequence token."
    )
    cache_state: CacheState = option(CacheState.cold, read_by=SERVED)
    temperature: float = request_option(0.0, "Sampling temperature; 0: greedy.", ge=0)
    top_k: int = request_option(0, "Number of most likely tokens to sample from; 0: all.", ge=0)
    top_p: float = request_option(
        1.0, "Cumulative probability of the tokens to sample from.", gt=0, le=1
    )
    num_heads: int = kernel_option(16, "Query heads.", ge=1)
    num_kv_heads: int = kernel_option(4, "Key/value heads.", ge=1)
    head_dim: int = kernel_option(128, "Head dimension.", ge=16, le=256, multiple_of=16)
    window: int | None = kernel_option(
        None, "Sliding window: keys that a query attends to.", ge=1, unit="keys", null_means="all"
    )
    dtype: Precision = option(
        Precision.float32, "Precision of queries, keys and values.", read_by=KERNEL
    )
    state: State = option(State.hot, read_by=KERNEL)
    max_pool_bytes: int = kernel_option(
        1 << 30, "Maximum KV pool of a case; larger cases are skipped.", ge=1 << 20, unit="bytes"
    )
    cases: list[Case] = option(factory=list, meaning="Batches to time, a row each.", read_by=KERNEL)
    made: list[Clip] = option(factory=list, meaning="Synthetic clips.", read_by=VIDEO)
    clips: str | None = video_option(
        None, "Folder of your own clips.", null_means="the clips of workload.made"
    )
    frames: int = video_option(16, "Frames to pick per clip.", ge=1, le=4096, unit="frames")
    picks: FramePicks = option(FramePicks.stream, read_by=VIDEO)
    decoder: Decoder = option(Decoder.pyav, read_by=VIDEO)
    decoder_threads: int = video_option(
        1, "Threads of each request's decoder.", ge=1, le=64, unit="threads"
    )
    questions: str | None = video_option(
        None,
        "JSON Lines file of questions about your own clips (docs/video.md), which workload.vlm "
        "answers from the picked frames.",
        null_means="none",
    )
    vlm: str | None = video_option(
        None,
        "Vision-language model that answers: a directory or hub id that mlx-vlm can load.",
        null_means="none",
    )
    texts: str | None = scoring_option(
        None,
        "Text to score: a UTF-8 file, or JSON Lines (FILE.jsonl) with the key text.",
        null_means="the packaged texts",
    )
    window_tokens: int = scoring_option(
        256, "Tokens per scored window.", ge=2, le=1 << 20, unit="tokens"
    )
    num_windows: int | None = scoring_option(
        None,
        "Number of windows to score, from the first. 0: with limits on quality and a design.time, "
        "as many as decide them, at looks after 1/4, 1/2 and all; else, and if the command sets "
        "design.blocks, all.",
        ge=0,
        null_means="all",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.repeats is not None or self.times_kernels,
            f"workload.repeats=null: {KIND}={self.kind} needs a number",
        )
        for name, kinds in (("prompts", REQUESTS), ("arrivals", SERVED), ("limits", SERVED)):
            group = getattr(self, name)
            require(
                self.kind in kinds or group == type(group)(),
                f"workload.{name}: {KIND}={self.kind} does not read it (read by {kinds})",
            )
        if self.serves:
            self._check_arrivals()
            return
        if self.times_kernels:
            self._check_kernel()
        elif not self.has_engine:
            self._check_video()

    @property
    def num_repeats(self) -> int:
        """The number of repeats; 1 if it still has to be found."""
        return self.repeats or 1

    @property
    def times_kernels(self) -> bool:
        """Whether the workload times attention kernels and serves no requests."""
        return self.kind in KERNEL

    @property
    def serves(self) -> bool:
        return self.kind in REQUESTS

    @property
    def loads_model(self) -> bool:
        return self.serves or self.kind in SCORING

    @property
    def has_engine(self) -> bool:
        """Whether the workload uses an engine or its kernels (all kinds but video)."""
        return self.kind not in VIDEO

    @property
    def primary_metrics(self) -> tuple[str, ...]:
        """The primary metrics if ``ablation.metric`` is null.

        It is empty for a class of the user's own, whose records say it (if it serves requests, the
        same ``serving_metric``).
        """
        if self.kind in PRIMARY_METRICS:
            return (PRIMARY_METRICS[self.kind],)
        return (self.serving_metric,) if self.kind == "requests" else ()

    @property
    def serving_metric(self) -> str:
        """The primary metric of served requests.

        If a rate or a trace sets the arrival times, the throughput only equals the offered load.
        """
        if self.limits.is_set:
            return "goodput_req_s"
        if self.per_request:
            return "e2e_ms"
        return "e2e_p50_ms" if self.arrivals.is_paced else "total_tok_s"

    def missing_for(self, metric: str) -> str | None:
        """Return the setting that this workload lacks for a metric, or None."""
        if metric == "goodput_req_s" and not self.limits.is_set:
            return "a limit such as workload.limits.ttft_ms=200"
        if metric in ("e2e_ms", "row_steps") and not self.per_request:
            return "workload.per_request=true"
        arrivals = self.arrivals.kind
        if metric == "late_p99_ms" and arrivals is ArrivalKind.closed:
            return "an open loop such as workload.arrivals.kind=at_once"
        unlimited = arrivals is ArrivalKind.at_once and self.concurrency is None
        if metric == "sent_req_s" and (arrivals is ArrivalKind.closed or unlimited):
            return "arrivals over time such as workload.arrivals.kind=poisson"
        return None

    def _check_video(self) -> None:
        require(
            bool(self.made) or self.clips is not None,
            f"workload={self.name}: there is no clip; set workload.made or workload.clips=DIR",
        )
        names = [clip.name for clip in self.made]
        require(
            len(set(names)) == len(names), "workload.made: two clips have the same name; rename one"
        )
        require(
            self.decoder is Decoder.pyav or self.picks is FramePicks.stream,
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
            "workload.questions and workload.vlm go together: set both or neither",
        )

    def _check_kernel(self) -> None:
        require(
            bool(self.cases),
            f"workload={self.name}: workload.cases is empty; set at least one case",
        )
        names = [case.name for case in self.cases]
        require(
            len(set(names)) == len(names),
            "workload.cases: two cases have the same name; rename one",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"workload.num_heads={self.num_heads} is not a multiple of "
            f"workload.num_kv_heads={self.num_kv_heads}",
        )

    def _check_arrivals(self) -> None:
        arrivals = self.arrivals.kind
        require(
            self.capacity is None or (self.limits.is_set and self.arrivals.rate is not None),
            "workload.capacity: needs limits and a rate; set workload.limits.ttft_ms (or another "
            "limit) and workload.arrivals.rate, or choose workload=chat_poisson",
        )
        closed = arrivals is ArrivalKind.closed
        require(
            self.concurrency is not None or not closed,
            "workload.concurrency=null: workload.arrivals.kind=closed needs a number of clients",
        )
        require(
            self.stagger_ms == 0 or closed,
            f"workload.stagger_ms={self.stagger_ms}: workload.arrivals.kind={arrivals.value} does "
            "not read it (read by closed); leave it 0",
        )
        require(
            arrivals is not ArrivalKind.trace
            or self.prompts.source in TIMESTAMPED_SOURCES
            or is_class_path(self.kind),  # its own source may have timestamps
            f"workload.arrivals.kind=trace: workload.prompts.source={self.prompts.source} has no "
            f"timestamps; set workload.prompts.source to one of {', '.join(TIMESTAMPED_SOURCES)}",
        )
        require(
            self.concurrency is None or not self.arrivals.is_paced,
            f"workload.concurrency={self.concurrency}: requests that arrive by themselves "
            f"(workload.arrivals.kind={arrivals.value}) do not wait for a client; set "
            "workload.concurrency=null",
        )
