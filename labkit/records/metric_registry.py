"""Registry of the metrics that labkit's workloads give: name, unit, direction and meaning.

``ablation.metric``, the sentences of reports and ``docs/metrics.md`` look metrics up here. A
user's own workload may give metrics that are not registered; their unit decides how sentences
about them are worded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.records.run_record import Metric

TIME_UNITS = ("us", "ms", "s")
SPEED_UNITS = (*TIME_UNITS, "tok/s", "req/s")
OUTPUTS = "outputs"  # value of ablation.metric for a question that the identity gate answers


@dataclass(frozen=True)
class EffectWords:
    """The words in which a sentence states how an arm differs from the baseline in a metric.

    ``takes 5 % less time per launch``, ``serves 12 % more requests per second``.
    """

    verb: str  # as in ``arms take``
    # What there is more or less of: ``time``, ``requests``. Empty if the verb says it (``waits``).
    quantity: str = ""
    detail: str = ""  # what the quantity refers to: ``per launch``
    at: str = ""  # the statistic, which short texts may leave out: ``at the median``
    less: str = "less"  # ``fewer`` for what is counted
    more: str = "more"
    # Whether sentences also give a difference in the metric's unit: ``12.0 ms less``. A share is
    # given in percentage points alone.
    in_unit: bool = False

    @property
    def singular_verb(self) -> str:
        """The verb as in ``an arm takes``."""
        return self.verb + ("es" if self.verb.endswith("ss") else "s")


@dataclass(frozen=True)
class MetricDefinition:
    """One metric. Name, unit and better are as in a record's :class:`labkit.records.Metric`."""

    name: str
    unit: str
    better: str
    kinds: tuple[str, ...]  # of workload that record the metric (``workload.kind``)
    label: str  # the name in a sentence, such as ``time to first token (median)``
    meaning: str  # a sentence
    words: EffectWords
    is_speed: bool = False  # the time of a launch or the throughput, whose noise the doctor knows
    # Computed from sizes and counts. If all runs of an arm have the same value, it has no noise and
    # is shown without a test.
    computed: bool = False
    abbreviation: str = ""  # the usual short name, such as ``E2E p50``

    @property
    def short_label(self) -> str:
        """The metric's short name, such as ``E2E p50``; its label if it has no abbreviation."""
        return self.abbreviation or self.label

    @property
    def zero_is_result(self) -> bool:
        """Whether 0 is a result like others, so that arms are compared by differences.

        A time of 0 was not measured, and a speed of 0 is that of an arm that did nothing. Requests
        that met no limit were served.
        """
        return self.name == "goodput_req_s" or self.unit not in SPEED_UNITS


def _time(detail: str, quantity: str = "time", at: str = "", in_unit: bool = False) -> EffectWords:
    return EffectWords("take", quantity, detail, at, in_unit=in_unit)


def _count(verb: str, quantity: str, detail: str) -> EffectWords:
    return EffectWords(verb, quantity, detail, less="fewer")


def _share(verb: str, of: str) -> EffectWords:
    return EffectWords(verb, f"of {of}", in_unit=True)


def _latencies() -> Iterator[MetricDefinition]:
    for name, short, label, meaning, verb, quantity, detail in (
        ("ttft", "TTFT", "time to first token", "from arrival to the first token",
         "wait", "", "for the first token"),
        ("tpot_excl_first", "TPOT", "time per output token", "per token after the first",
         "take", "time", "per output token"),
        ("itl_chunk", "ITL", "gap between tokens", "between two chunks of a request's output",
         "pause", "", "between tokens"),
        ("e2e", "E2E", "end-to-end latency", "from arrival to the last token",
         "take", "time", "per request"),
    ):  # fmt: skip
        for percentile, word in ((50, "median"), (99, "p99")):
            at = "at p99" if percentile == 99 else "at the median"
            yield MetricDefinition(
                f"{name}_p{percentile}_ms", "ms", "lower", REQUESTS, f"{label} ({word})",
                f"Time {meaning}, {word} over requests."
                if name != "itl_chunk"
                else f"Time {meaning}, {word} over all gaps.",
                EffectWords(verb, quantity, detail, at, in_unit=True),
                abbreviation=f"{short} p{percentile}",
            )  # fmt: skip


REQUESTS = ("requests",)
HEADROOM = ("headroom",)
DEFINITIONS: tuple[MetricDefinition, ...] = (
    MetricDefinition(
        "dispatch_us", "us", "lower", ("kernel",), "time per launch",
        "Time of one launch in a chain of launches.", _time("per launch"), is_speed=True,
    ),
    MetricDefinition(
        "single_us", "us", "lower", ("kernel",), "time of a single launch",
        "Time of one launch by itself.", _time("for a single launch"), is_speed=True,
    ),
    MetricDefinition(
        "total_tok_s", "tok/s", "higher", ("requests", "scoring"), "throughput",
        "Prompt and output tokens per second; in a scoring workload, tokens of the scored windows.",
        _count("process", "tokens", "per second"), is_speed=True,
    ),
    MetricDefinition(
        "output_tok_s", "tok/s", "higher", REQUESTS, "output throughput",
        "Output tokens per second.", _count("serve", "output tokens", "per second"), is_speed=True,
    ),
    MetricDefinition(
        "request_s", "req/s", "higher", ("requests", "video"), "request throughput",
        "Served requests per second.", _count("serve", "requests", "per second"), is_speed=True,
    ),
    MetricDefinition(
        "wall_s", "s", "lower", REQUESTS, "time for all requests",
        "Time from the first arrival to the end of the last request.",
        _time("for all requests"), is_speed=True,
    ),
    MetricDefinition(
        "goodput_req_s", "req/s", "higher", REQUESTS, "goodput",
        "Requests per second that met every limit of workload.limits.",
        _count("serve", "requests within the limits", "per second"),
    ),
    *_latencies(),
    MetricDefinition(
        "tpot_excl_first_mean_ms", "ms", "lower", REQUESTS, "time per output token (mean)",
        "Time per token after the first, mean over requests.",
        _time("per output token", at="on average", in_unit=True), abbreviation="TPOT mean",
    ),
    MetricDefinition(
        "tpot_incl_first_mean_ms", "ms", "lower", REQUESTS,
        "time per output token with the first (mean)",
        "Time from arrival to the last token, divided by the output tokens; mean over requests.",
        _time("per output token with the first", at="on average", in_unit=True),
    ),
    MetricDefinition(
        "e2e_ms", "ms", "lower", REQUESTS, "end-to-end latency",
        "Time from arrival to the last token of one request, with workload.per_request.",
        _time("for the request", in_unit=True),
    ),
    MetricDefinition(
        "row_steps", "steps", "lower", REQUESTS, "number of steps of a row",
        "Steps that produced a token of one request, plus steps that computed its row after it had "
        "ended, with workload.per_request.", _count("take", "steps", ""), computed=True,
    ),
    MetricDefinition(
        "peak_kv_bytes", "bytes", "lower", REQUESTS, "peak KV memory",
        "Peak of the KV memory allocated to requests.",
        EffectWords("use", "KV memory", "at its peak", in_unit=True), computed=True,
    ),
    MetricDefinition(
        "kv_waste_pct", "%", "lower", REQUESTS, "wasted KV memory",
        "Share of the KV memory of finished requests that no token filled.",
        _share("waste", "its KV memory"), computed=True,
    ),
    MetricDefinition(
        "shape_repeated_pct", "%", "higher", REQUESTS, "share of repeated shapes",
        "Share of steps that have the shape of the step before.",
        _share("repeat", "its shapes"), computed=True,
    ),
    MetricDefinition(
        "host_ms_per_step", "ms", "lower", REQUESTS, "host time per step",
        "Time per step in which the host does not wait for the model.",
        _time("per step", "host time", in_unit=True),
    ),
    MetricDefinition(
        "sent_req_s", "req/s", "higher", REQUESTS, "rate of sent requests",
        "Requests sent per second in an open loop.", _count("send", "requests", "per second"),
    ),
    MetricDefinition(
        "late_p99_ms", "ms", "lower", REQUESTS, "lateness of the load generator (p99)",
        "Delay with which an open loop sent its requests, p99.",
        EffectWords("lag", detail="behind the arrivals", at="at p99", in_unit=True),
    ),
    MetricDefinition(
        "taken_pct", "% of RAM", "lower", HEADROOM, "memory taken",
        "Share of RAM that the budget takes.", _share("take", "the memory"), computed=True,
    ),
    MetricDefinition(
        "left_pct", "% of RAM", "higher", HEADROOM, "memory left",
        "Share of RAM that the budget leaves; negative if it takes more than there is.",
        _share("leave", "the memory"), computed=True,
    ),
    MetricDefinition(
        "ceiling_pct", "% of RAM", "higher", HEADROOM, "memory allowed",
        "The policy's limit on weights, activations and KV memory together.",
        _share("allow", "the memory"), computed=True,
    ),
    MetricDefinition(
        "kv_tokens", "tokens", "higher", HEADROOM, "KV capacity",
        "Tokens that the KV memory can hold.", _count("hold", "tokens", "in KV memory"),
        computed=True,
    ),
    MetricDefinition(
        "decode_ms", "ms", "lower", ("video",), "decoding time",
        "Time to decode the picked frames of one clip.", _time("to decode a clip's frames"),
        is_speed=True,
    ),
)  # fmt: skip
METRICS = {definition.name: definition for definition in DEFINITIONS}


def metric_definition(name: str | None, unit: str | None) -> MetricDefinition:
    """Return a metric's definition. For an unregistered metric, derive one from the unit."""
    known = METRICS.get(name or "")
    if known is not None and unit in (known.unit, None):
        return known
    return MetricDefinition(
        name or "", unit or "", "lower", (), name or "", "", _words_of_unit(name or "", unit or ""),
        is_speed=unit in SPEED_UNITS,
    )  # fmt: skip


def _words_of_unit(name: str, unit: str) -> EffectWords:
    if unit in TIME_UNITS:
        return _time(f"({name})")
    if unit == "bytes":
        return EffectWords("use", "memory", f"({name})", in_unit=True)
    points = unit.startswith("%")
    return EffectWords("measure", detail=f"in {name}", less="lower", more="higher", in_unit=points)


def measured(name: str, repeats: Sequence[float], primary: bool = False) -> Metric:
    """Return the values of a registered metric, with its unit and direction.

    Raises ``KeyError`` if the metric is not registered.
    """
    definition = METRICS[name]
    return Metric(name, definition.unit, definition.better, primary, tuple(repeats))


def metric_names(kind: str) -> tuple[str, ...]:
    """Return the metrics that a kind of workload can give; empty for a user's own kind."""
    return tuple(name for name, definition in METRICS.items() if kind in definition.kinds)
