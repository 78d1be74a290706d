"""The notes of a record and of its cases: their keys and types, declared once.

Every key may be missing: an engine or workload notes what it has, older records note less, and a
user's own workload may note more. A key that ends with a unit (``_ms``, ``_bytes``, ...) has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Percentiles = Mapping[str, float]  # such as {"p50": 1.2, "p99": 3.4}


class RequestNote(TypedDict, total=False):
    """One served request. Latencies count from ``arrived_ms``, else from ``submitted_ms``.

    ``queued_ms`` is the part in which the client waited for a place among ``concurrency``.
    ``first_chunk`` and ``untimed_tokens``: tokens that TPOT leaves out, if not 1 and 0.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    first_chunk: int
    untimed_tokens: int
    arrived_ms: float
    queued_ms: float
    submitted_ms: float
    admitted_ms: float | None
    ttft_ms: float
    e2e_ms: float
    itl_ms: Sequence[float]


class UnservedNote(TypedDict):
    """A request that was refused or failed."""

    id: str
    outcome: str
    error: str | None


class TrafficNote(TypedDict, total=False):
    """The outcomes of a run's requests, and how the client sent them."""

    arrivals: str
    requests: int
    served: int
    refused: int
    failed: int
    good: int  # served within every limit
    unserved: Sequence[UnservedNote]
    asked_per_s: float
    asked_unit: str
    due_per_s: float
    sent_per_s: float
    queue_ms: Percentiles
    late_ms: Percentiles
    sender_cpu_s: float
    sender_cpu_share: float


class ScoringNote(TypedDict, total=False):
    """A text workload's scores, per window of text."""

    reference_top: int
    reference_rest: float
    windows: Sequence[Mapping[str, Any]]
    worst: Sequence[Mapping[str, Any]]


class VideoNote(TypedDict):
    """A clip, and the work of decoding the frames picked from it; None if unknown."""

    frames: int
    seconds: float
    keyframes: int
    keyframe_places: Sequence[Sequence[int]] | None
    packets_read: int | None
    packets_decoded: int | None
    frames_decoded: int
    delta_frames: int | None
    seeks: int | None
    repeated: int
    distance_frames: float
    most_frames: int
    distance_ms: float
    most_ms: float


class EvidenceNote(TypedDict):
    """How many of the planted events of one kind the picked frames show."""

    visible: int
    planted: int


class CaseNotes(TypedDict, total=False):
    """The notes of one case.

    Parameters
    ----------
    requests, traffic, as_measured
        Of a workload of requests. ``as_measured`` holds metrics whose times include stalls; of a
        kernel, for each round the mean of its launches where the fastest counts.
    kernel, state, counters, flops, least_bytes, turns, over_rounds, map_us, plan_us
        Of a kernel: its name, ``hot`` or ``cold`` caches, the counters of one launch, its work,
        the arm's position in each round, the estimator over the rounds, and the host's times.
    launches, empty_us, empty_single_us, host_us
        Of queued launches.
    scoring
        Of a workload that scores texts.
    video, evidence
        Of a clip.
    """

    requests: Sequence[RequestNote]
    traffic: TrafficNote
    as_measured: Mapping[str, float | Sequence[float]]
    kernel: str
    state: str
    counters: Mapping[str, float]
    flops: int
    least_bytes: int
    turns: Sequence[int]
    over_rounds: str
    map_us: float
    plan_us: float
    launches: int
    empty_us: float | Sequence[float]
    empty_single_us: float | Sequence[float]
    host_us: float | Sequence[float]
    scoring: ScoringNote
    video: VideoNote
    evidence: Mapping[str, EvidenceNote]


class LimitsNote(TypedDict):
    """The machine's peak rates, measured after the kernels."""

    read_gb_s: float
    sgemm_gflop_s: float
    threads: int
    read_bytes: int


class SharingNote(TypedDict):
    """The prompt tokens that an unlimited prefix cache would hit."""

    prompt_tokens: int
    shared_tokens: int
    block_size: int
    unshared: bool


class RectangleNote(TypedDict):
    """The tokens of all requests, and the slots of one batch padded to the longest of them."""

    tokens: int
    slots: int


class StallsNote(TypedDict, total=False):
    """Steps that the machine stalled: how many, their seconds, and the run's seconds."""

    steps: int
    seconds: float
    of_s: float


class StepPartsNote(TypedDict):
    """The time of steps by part, from turns with clocks that follow the measurement.

    ``steps`` and ``parts_us`` are by kind of step (``prefill``, ``decode``), and ``parts_us`` then
    by part. ``output_tokens``: tokens of these turns. ``clocks_us``: what the clocks add to a step.
    """

    steps: Mapping[str, int]
    parts_us: Mapping[str, Mapping[str, float]]
    clocks_us: float
    output_tokens: int


class ObserverNote(TypedDict, total=False):
    """What watched the machine beside a run: its cost, and its samples by name."""

    period_s: float
    cpu_s: float
    share: float
    samples: Mapping[str, Sequence[float]]


class EngineNote(TypedDict, total=False):
    """The engine; ``server`` and ``client`` if it is an HTTP server."""

    server: Mapping[str, Any]
    client: Mapping[str, Any]


class AnswersNote(TypedDict):
    """How many questions about a clip's frames a model was asked, and answered correctly."""

    asked: int
    right: int


class RunNotes(TypedDict, total=False):
    """The notes of a run.

    Parameters
    ----------
    isolation, together
        ``process``, ``in_process`` or ``live``, and the arms that took turns.
    failed_by, log
        The run whose failure ended this one, and the log within the cell's folder.
    timeline
        Memory in time: ``t_s`` and series of bytes.
    step_trace
        The file of traced steps (:mod:`labkit.records.step_trace_file`).
    hardware
        Of a kernel workload: by case, the hardware counters of one launch; or ``unavailable``, the
        reason that there are none.
    """

    isolation: str
    together: Sequence[str]
    failed_by: str
    log: str
    limits: LimitsNote
    timeline: Mapping[str, Any]
    observer: ObserverNote
    engine: EngineNote
    stalls: StallsNote
    sharing: SharingNote
    rectangle: RectangleNote
    cache_state: str
    answers: AnswersNote
    removed_environment: Sequence[str]
    step_trace: Mapping[str, Any]
    step_parts: StepPartsNote
    hardware: Mapping[str, Any]
    compiles: Mapping[str, int]
