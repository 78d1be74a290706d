"""Prompts, output lengths, arrivals and SLOs of a workload's requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from labkit.config.option import Group, ReadBy, option, require

MAX_REQUESTS = 100_000
MAX_LENGTH_TOKENS = 1 << 20  # per prompt or output
MAX_PROMPT_CHARACTERS = 4 << 20  # per prompt
MAX_TIMESTAMP_MS = 30 * 24 * 3600 * 1000  # 30 days
length_option = partial(option, ge=1, le=MAX_LENGTH_TOKENS, unit="tokens")


class LengthKind(Enum):
    """Distribution of lengths. listed: the given values, in order."""

    fixed = "fixed"
    uniform = "uniform"
    lognormal = "lognormal"
    listed = "listed"


DRAWN = ReadBy("kind", (LengthKind.uniform, LengthKind.lognormal))
LOGNORMAL = ReadBy("kind", (LengthKind.lognormal,))


@dataclass
class Lengths(Group):
    """Lengths in tokens, drawn from a distribution or listed."""

    kind: LengthKind = option(LengthKind.fixed)
    tokens: int = length_option(
        128, "Length of every request.", read_by=ReadBy("kind", (LengthKind.fixed,))
    )
    low: int | None = length_option(
        None, "Minimum; shorter draws are raised to it.", null_means="1", read_by=DRAWN
    )
    high: int | None = length_option(
        None, "Maximum; longer draws are cut to it.", null_means=str(MAX_LENGTH_TOKENS),
        read_by=DRAWN,
    )  # fmt: skip
    median: float | None = length_option(
        None, "Median of the lognormal distribution.", read_by=LOGNORMAL
    )
    sigma: float | None = option(
        None, "Standard deviation of the logarithm.", ge=0, le=10, read_by=LOGNORMAL
    )
    values: list[int] = option(
        factory=list, meaning="Lengths in order, repeated from the first when they run out.",
        read_by=ReadBy("kind", (LengthKind.listed,)),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        parameters = {"uniform": ("low", "high"), "lognormal": ("median", "sigma")}
        for name in parameters.get(self.kind.value, ()):
            require(
                getattr(self, name) is not None,
                f"{name}=null: kind={self.kind.value} needs a number",
            )
        low, high = self.bounds
        require(low <= high, f"low={low}: must be at most high={high}")
        if self.kind is LengthKind.listed:
            require(bool(self.values), "values=[]: kind=listed needs at least one length")
        for value in self.values:
            allowed = f"must be 1 to {MAX_LENGTH_TOKENS} (tokens)"
            require(1 <= value <= MAX_LENGTH_TOKENS, f"values: {value}: {allowed}")

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest length that may be drawn."""
        return self.low or 1, self.high or MAX_LENGTH_TOKENS


@dataclass
class Message(Group):
    """One message of a conversation."""

    role: str = option("user", "Role of the speaker.", choices=("system", "user", "assistant"))
    content: str = option("", "Text of the message.")


@dataclass
class ListedRequest(Group):
    """A request as a user writes it, in YAML or as a line of a file."""

    prompt: str | None = option(
        None, "Prompt text, which the model continues.", null_means="a request with messages"
    )
    messages: list[Message] | None = option(
        None,
        "Conversation, to which the model's chat template is applied.",
        null_means="a request with a prompt",
    )
    max_tokens: int | None = length_option(
        None, "Output length.", null_means="workload.prompts.output"
    )
    timestamp: float | None = option(
        None, "Arrival time, from the start of the run.", ge=0, le=MAX_TIMESTAMP_MS,
        unit="milliseconds", null_means="not recorded",
    )  # fmt: skip
    session: str | None = option(
        None,
        "Session of the request; each request waits for the answer to the one before.",
        null_means="no session",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        either = (self.prompt is None) != (self.messages is None)
        require(either, "prompt: set either prompt or messages")
        texts = [self.prompt] if self.messages is None else [m.content for m in self.messages]
        text = "".join(one or "" for one in texts)
        name = "prompt" if self.messages is None else "messages"
        require(
            1 <= len(text) <= MAX_PROMPT_CHARACTERS,
            f"{name} has {len(text)} characters; it must have 1 to {MAX_PROMPT_CHARACTERS}",
        )
        half = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        require(half is None, f"{name} is not valid Unicode (lone surrogate)")


SOURCE = "workload.prompts.source"
LENGTH_TRACES = ("trace", "burstgpt", "azure")  # files of lengths and arrival times, without texts
SOURCES = (
    "chat",
    "agent",
    "listed",
    "file",
    "sharegpt",
    "vllm_custom",
    *LENGTH_TRACES,
    "synthetic",
)
TIMESTAMPED_SOURCES = ("listed", "file", *LENGTH_TRACES)  # whose requests may have timestamps
SYNTHETIC = ReadBy(SOURCE, ("synthetic",))
FROM_FILE = ReadBy(SOURCE, ("file", "sharegpt", "vllm_custom", *LENGTH_TRACES))


@dataclass
class Prompts(Group, place="workload.prompts"):
    """Source of the prompts and their lengths."""

    source: str = option(
        "chat",
        "Source of prompts: packaged texts (chat, agent), the listed requests, a JSON Lines file, "
        "a ShareGPT file, vLLM's custom dataset, a trace of Mooncake (trace), BurstGPT or Azure, "
        "or random token ids (synthetic).",
        choices=SOURCES,
    )
    path: str | None = option(
        None, "Path of the file or trace.", null_means="no file", read_by=FROM_FILE
    )
    listed: list[ListedRequest] = option(
        factory=list, meaning="List of requests.", read_by=ReadBy(SOURCE, ("listed",))
    )
    requests: int = option(16, "Number of requests.", ge=1, le=MAX_REQUESTS, read_by=SYNTHETIC)
    input: Lengths = field(default_factory=Lengths)
    output: Lengths = field(default_factory=Lengths)
    prefix_tokens: int = length_option(
        0, "Length of the prefix that the prompts of a group share.", ge=0, read_by=SYNTHETIC
    )
    prefix_groups: int = option(
        1,
        "Number of groups; each has its own shared prefix.",
        ge=1,
        le=MAX_REQUESTS,
        read_by=SYNTHETIC,
    )
    turns: int = option(
        1, "Turns per session; a prompt begins with the previous prompt and answer.",
        ge=1, le=MAX_REQUESTS, read_by=SYNTHETIC,
    )  # fmt: skip
    length_scale: float = option(
        1.0, "Factor by which a trace's lengths are multiplied.", gt=0, le=100,
        read_by=ReadBy(SOURCE, LENGTH_TRACES),
    )  # fmt: skip
    seed: int | None = option(
        None, "Seed of lengths and texts.", ge=0, le=(1 << 32) - 1, null_means="the experiment's",
        read_by=ReadBy(SOURCE, ("listed", "file", "vllm_custom", *LENGTH_TRACES, "synthetic")),
    )  # fmt: skip
    unshared: bool = option(
        False,
        "Give every prompt a unique first token, so that no two share a prefix (a control for "
        "prefix caching).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        source = f"{SOURCE}={self.source}"
        needs_file = self.source in FROM_FILE
        require(
            self.path is not None or not needs_file, f"{source}: set workload.prompts.path=FILE"
        )
        require(
            bool(self.listed) or self.source != "listed",
            f"{source}: workload.prompts.listed is empty; list a request",
        )
        require(
            self.source in SYNTHETIC or self.input == Lengths(),
            f"workload.prompts.input: {source} does not read it (read by {SYNTHETIC})",
        )
        require(
            self.source in ("synthetic", "listed", "file", "vllm_custom")
            or self.output == Lengths(),
            f"workload.prompts.output: {source} does not read it, because its requests "
            "have output lengths of their own",
        )
        require(
            self.requests % self.turns == 0,
            f"workload.prompts.requests={self.requests}: must be a multiple of "
            f"workload.prompts.turns={self.turns}",
        )


class ArrivalKind(Enum):
    """Arrival process.

    closed: a closed loop, in which a client sends its next request when the previous one is
    answered. at_once: all requests at the start. constant, poisson, gamma: an open loop at a rate,
    with gaps from that distribution. trace: at the recorded times.
    """

    closed = "closed"
    at_once = "at_once"
    constant = "constant"
    poisson = "poisson"
    gamma = "gamma"
    trace = "trace"


ARRIVALS = "workload.arrivals.kind"
AT_A_RATE = ReadBy(ARRIVALS, (ArrivalKind.constant, ArrivalKind.poisson, ArrivalKind.gamma))


@dataclass
class Arrivals(Group, place="workload.arrivals"):
    """Arrival times of requests."""

    kind: ArrivalKind = option(ArrivalKind.closed)
    rate: float | None = option(
        None, "Arrival rate of requests, or of sessions if a session has several turns.", gt=0,
        le=1_000_000, unit="requests/s", read_by=AT_A_RATE,
    )  # fmt: skip
    shape: float = option(
        1.0, "Shape of the gamma distribution of gaps; 1: Poisson, below 1: bursts, above 1: more "
        "regular.", gt=0, le=1000,
        read_by=ReadBy(ARRIVALS, (ArrivalKind.gamma,)),
    )  # fmt: skip
    time_scale: float = option(
        1.0, "Factor on recorded times; 0.5 replays twice as fast.", gt=0, le=1000,
        read_by=ReadBy(ARRIVALS, (ArrivalKind.trace,)),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rate is not None or self.kind not in AT_A_RATE,
            f"{ARRIVALS}={self.kind.value}: set workload.arrivals.rate (requests/s)",
        )

    @property
    def is_paced(self) -> bool:
        """Whether a rate or a trace sets the arrival times, independently of the engine's speed."""
        return self.kind in AT_A_RATE or self.kind is ArrivalKind.trace


limit_option = partial(option, None, gt=0, unit="milliseconds", null_means="no limit")


@dataclass
class LatencySLO(Group, place="workload.limits"):
    """Latency SLOs. Goodput counts the requests that meet all of them."""

    ttft_ms: float | None = limit_option("Maximum time to first token.")
    tpot_ms: float | None = limit_option("Maximum time per output token after the first.")
    e2e_ms: float | None = limit_option("Maximum end-to-end latency.")

    @property
    def is_set(self) -> bool:
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, self.e2e_ms))
