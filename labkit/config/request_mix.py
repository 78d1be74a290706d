"""What requests are made of, when they arrive, and how soon an answer must come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from labkit.config.option import Group, ReadBy, option, require

MOST_REQUESTS = 100_000
MOST_TOKENS = 1 << 20  # of one prompt or one output
MOST_CHARACTERS = 4 << 20  # of one prompt
MOST_MS = 30 * 24 * 3600 * 1000  # of a timestamp


class LengthKind(Enum):
    """How lengths are drawn: all alike, evenly, by a lognormal law, or one after the other."""

    fixed = "fixed"
    uniform = "uniform"
    lognormal = "lognormal"
    listed = "listed"


DRAWN = ReadBy("kind", (LengthKind.uniform, LengthKind.lognormal))
LOGNORMAL = ReadBy("kind", (LengthKind.lognormal,))


@dataclass
class Lengths(Group):
    """Lengths in tokens, as a law or a list."""

    kind: LengthKind = option(LengthKind.fixed)
    tokens: int = option(
        128, "Of each.", least=1, most=MOST_TOKENS, unit="tokens",
        read_by=ReadBy("kind", (LengthKind.fixed,)),
    )  # fmt: skip
    low: int | None = option(
        None, "The smallest; a smaller one is made so long.", least=1, most=MOST_TOKENS,
        unit="tokens", null="1", read_by=DRAWN,
    )  # fmt: skip
    high: int | None = option(
        None, "The largest; a larger one is made so short.", least=1, most=MOST_TOKENS,
        unit="tokens", null=str(MOST_TOKENS), read_by=DRAWN,
    )  # fmt: skip
    median: float | None = option(
        None, "Half are shorter.", least=1, most=MOST_TOKENS, unit="tokens", read_by=LOGNORMAL
    )
    sigma: float | None = option(
        None, "The deviation of the logarithm.", least=0, most=10, read_by=LOGNORMAL
    )
    values: list[int] = option(
        factory=list, meaning="In this order; again from the first where they run out.",
        read_by=ReadBy("kind", (LengthKind.listed,)),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check that the law is whole."""
        super().__post_init__()
        needed = {"uniform": ("low", "high"), "lognormal": ("median", "sigma")}
        for name in needed.get(self.kind.value, ()):
            given = getattr(self, name) is not None
            require(given, f"{name}=null: kind={self.kind.value} needs it")
        low, high = self.bounds
        require(low <= high, f"low={low}: must be at most high={high}")
        if self.kind is LengthKind.listed:
            require(bool(self.values), "values=[]: kind=listed needs one length at least")
        for value in self.values:
            allowed = f"allowed are 1 to {MOST_TOKENS} (tokens)"
            require(1 <= value <= MOST_TOKENS, f"values: {value}: {allowed}")

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest length that a law may give."""
        return self.low or 1, self.high or MOST_TOKENS


@dataclass
class Message(Group):
    """One message of a conversation."""

    role: str = option("user", "Who speaks.", words=("system", "user", "assistant"))
    content: str = option("", "What is said.")


@dataclass
class ListedRequest(Group):
    """One request as a user writes it, in YAML or as a line of a file."""

    prompt: str | None = option(
        None, "Text that the model continues, as it is.", null="messages, of which there is one"
    )
    messages: list[Message] | None = option(
        None, "A conversation, written by the model's chat template.", null="prompt"
    )
    max_tokens: int | None = option(
        None, "Of the answer.", least=1, most=MOST_TOKENS, unit="tokens",
        null="workload.prompts.output",
    )  # fmt: skip
    timestamp: float | None = option(
        None, "When it arrives, from the beginning.", least=0, most=MOST_MS, unit="milliseconds",
        null="not recorded",
    )  # fmt: skip
    session: str | None = option(
        None, "Requests of one session wait for the answer to the one before.", null="of none"
    )

    def __post_init__(self) -> None:
        """Check that it asks something that is a text."""
        super().__post_init__()
        require((self.prompt is None) != (self.messages is None), "give prompt or messages")
        texts = [self.prompt] if self.messages is None else [m.content for m in self.messages]
        text = "".join(one or "" for one in texts)
        name = "prompt" if self.messages is None else "messages"
        require(
            1 <= len(text) <= MOST_CHARACTERS,
            f"{name}: {len(text)} characters; allowed are 1 to {MOST_CHARACTERS}",
        )
        half = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        require(half is None, f"{name}: not Unicode text (half of a surrogate pair)")


SOURCE = "workload.prompts.source"
SOURCES = ("chat", "agent", "listed", "file", "trace", "synthetic")
TIMED = ("listed", "file", "trace")  # they may say when a request arrives
SYNTHETIC = ReadBy(SOURCE, ("synthetic",))
FROM_FILE = ReadBy(SOURCE, ("file", "trace"))


@dataclass
class Prompts(Group, place="workload.prompts"):
    """What requests are made of."""

    source: str = option(
        "chat",
        "Packaged texts (chat, agent), what is listed, a file of JSON lines, a Mooncake trace, or "
        "random token ids.",
        words=SOURCES,
    )
    path: str | None = option(None, "The file.", null="no file", read_by=FROM_FILE)
    listed: list[ListedRequest] = option(
        factory=list, meaning="The requests.", read_by=ReadBy(SOURCE, ("listed",))
    )
    requests: int = option(
        16, "How many there are.", least=1, most=MOST_REQUESTS, read_by=SYNTHETIC
    )
    input: Lengths = field(default_factory=Lengths)
    output: Lengths = field(default_factory=Lengths)
    prefix_tokens: int = option(
        0, "Tokens with which every prompt of a group begins, before its own.", least=0,
        most=MOST_TOKENS, unit="tokens", read_by=SYNTHETIC,
    )  # fmt: skip
    prefix_groups: int = option(
        1, "How many such groups there are.", least=1, most=MOST_REQUESTS, read_by=SYNTHETIC
    )
    turns: int = option(
        1, "Requests of a session, each of which begins with the one before and its answer.",
        least=1, most=MOST_REQUESTS, read_by=SYNTHETIC,
    )  # fmt: skip
    length_scale: float = option(
        1.0, "By what a trace's lengths are multiplied.", above=0, most=100,
        read_by=ReadBy(SOURCE, ("trace",)),
    )  # fmt: skip
    seed: int | None = option(
        None, "Of what is drawn.", least=0, most=(1 << 32) - 1, null="the experiment's",
        read_by=ReadBy(SOURCE, ("listed", "file", "trace", "synthetic")),
    )  # fmt: skip
    unshared: bool = option(
        False,
        "Every prompt has a first token of its own, so that none begins like another: the control "
        "of whoever counts shared beginnings.",
    )

    def __post_init__(self) -> None:
        """Check that the source has what it reads, and that lengths are read."""
        super().__post_init__()
        source = f"{SOURCE}={self.source}"
        needs_file = self.source in FROM_FILE
        require(self.path is not None or not needs_file, f"{source}: set workload.prompts.path")
        require(
            bool(self.listed) or self.source != "listed", f"{source}: workload.prompts.listed=[]"
        )
        require(
            self.source in SYNTHETIC or self.input == Lengths(),
            f"workload.prompts.input: {source} does not read it; it is for {SYNTHETIC}",
        )
        require(
            self.source in ("synthetic", "listed", "file") or self.output == Lengths(),
            f"workload.prompts.output: {source} does not read it; its answers have lengths",
        )
        require(
            self.requests % self.turns == 0,
            f"workload.prompts.requests={self.requests}: not a multiple of "
            f"workload.prompts.turns={self.turns}",
        )


class ArrivalKind(Enum):
    """When requests arrive: the next when one is answered, all at once, at a rate, or as recorded.

    At a rate: with constant gaps, those of a Poisson process, or of a gamma law.
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
    """When requests arrive."""

    kind: ArrivalKind = option(ArrivalKind.closed)
    rate: float | None = option(
        None, "How many arrive; of sessions with turns the first ones.", above=0, most=1_000_000,
        unit="requests/s", read_by=AT_A_RATE,
    )  # fmt: skip
    shape: float = option(
        1.0, "Of the gamma law; 1: Poisson, less: bursts, more: regular.", above=0, most=1000,
        read_by=ReadBy(ARRIVALS, (ArrivalKind.gamma,)),
    )  # fmt: skip
    time_scale: float = option(
        1.0, "By what recorded times are multiplied; 0.5: twice as fast.", above=0, most=1000,
        read_by=ReadBy(ARRIVALS, (ArrivalKind.trace,)),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check that what comes at a rate has one."""
        super().__post_init__()
        require(
            self.rate is not None or self.kind not in AT_A_RATE,
            f"{ARRIVALS}={self.kind.value}: set workload.arrivals.rate (requests/s)",
        )


@dataclass
class Limits(Group, place="workload.limits"):
    """How soon an answer must come to count into goodput."""

    ttft_ms: float | None = option(
        None, "To the first token.", above=0, unit="milliseconds", null="no limit"
    )
    tpot_ms: float | None = option(
        None, "Per token after it.", above=0, unit="milliseconds", null="no limit"
    )
    e2e_ms: float | None = option(
        None, "To the last token.", above=0, unit="milliseconds", null="no limit"
    )

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, self.e2e_ms))
