"""The schema of a cell's files: records of runs, and arms.

The classes are frozen dataclasses that check their values at construction.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from labkit.records.record_notes_schema import CaseNotes, RunNotes

SCHEMA_VERSION = 1
OLDER_VERDICTS = {"faster": "better", "slower": "worse"}  # names in older files and commands
OUTCOMES = ("ok", "refused", "oom", "timeout", "crashed", "stale", "invalid_output", "vacuous")
ROLES = ("baseline", "arm", "control")
BETTER = ("higher", "lower")
# Suffix of the folder of a cell that confirms another cell in separate processes.
PROCESSES_SUFFIX = "~processes"
RUN_NAME = re.compile(r"b(?P<block>\d{2,})-p(?P<position>\d{2,})-(?P<arm>[\w.=,-]+)")


class RecordError(ValueError):
    """A file of a study is not valid. The message is a single line that names the file."""

    outcome = "invalid_output"  # of the run that raises it: labkit.experiment.worker.run_failures


def require(condition: bool, message: str) -> None:
    """Raise ``RecordError(message)`` unless ``condition`` holds."""
    if not condition:
        raise RecordError(message)


def run_name(block: int, position: int, arm: str) -> str:
    """Return the name of a run, which is the stem of its files: ``b00-p02-ARM``."""
    return f"b{block:02d}-p{position:02d}-{arm}"


def parse_run_name(name: str) -> tuple[int, int, str]:
    """Return block, position and arm of a run's name.

    Raises ``RecordError`` if ``name`` is not ``b<block>-p<position>-<arm>``.
    """
    if (match := RUN_NAME.fullmatch(name)) is None:
        raise RecordError(f"{name} is not a run's name, such as b00-p02-ARM")
    return int(match["block"]), int(match["position"]), match["arm"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of one case, with its value in each repeat of the run. All values are finite."""

    name: str
    unit: str
    better: str
    primary: bool
    repeats: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            self.better in BETTER,
            f"metric {self.name}: better={self.better!r}: must be one of: {', '.join(BETTER)}",
        )
        require(bool(self.repeats), f"metric {self.name} has no value")
        if not all(map(math.isfinite, self.repeats)):
            bad = next(x for x in self.repeats if not math.isfinite(x))
            raise RecordError(f"metric {self.name}: {bad} is not a finite number")


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """The results of one case of the workload, or the reason that the case was skipped."""

    case: str
    skipped: str | None = None
    metrics: tuple[Metric, ...] = ()
    outputs: Mapping[str, Any] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known_notes(self) -> CaseNotes:
        """The notes, with the types of those that labkit's own workloads write."""
        return cast(CaseNotes, self.notes)


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one run: one arm, once, in one fresh process."""

    arm: str
    role: str
    block: int
    position: int
    seed: int
    outcome: str
    started: str
    detail: str | None = None  # one line about the failure
    # Wall seconds per stage (labkit.experiment.worker.worker_setup).
    seconds: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    environment_end: Mapping[str, Any] = field(default_factory=dict)
    # Times (us) of the machine probe, before and after the measurement, by kernel. The probe is a
    # fixed computation, the same for every arm.
    probe: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    cases: tuple[CaseRecord, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    # Unknown keys of the file, such as those of later versions of labkit.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.role in ROLES, f"role {self.role!r}: must be one of: {', '.join(ROLES)}")
        require(
            self.outcome in OUTCOMES,
            f"outcome {self.outcome!r}: must be one of: {', '.join(OUTCOMES)}",
        )
        require(min(self.block, self.position) >= 0, "block and position must be 0 or more")
        require(self.outcome == "ok" or bool(self.detail), f"outcome {self.outcome} needs a detail")
        names = [case.case for case in self.cases]
        require(len(set(names)) == len(names), "two cases have the same name")

    @property
    def run(self) -> str:
        """The run's name, which is also the stem of its file."""
        return run_name(self.block, self.position, self.arm)

    @property
    def known_notes(self) -> RunNotes:
        """The notes, with the types of those that labkit itself writes."""
        return cast(RunNotes, self.notes)

    @property
    def ok(self) -> bool:
        """Whether the run succeeded."""
        return self.outcome == "ok"

    @property
    def start_up_s(self) -> float | None:
        """Wall seconds of the run's process outside its measurement, or None if unknown."""
        process, measure = self.seconds.get("process"), self.seconds.get("measure")
        return None if process is None or measure is None else process - measure

    @property
    def suspended_s(self) -> float:
        """Seconds that the run lost because labkit was suspended (ctrl-Z)."""
        return self.seconds.get("suspended", 0.0)

    @property
    def output_tokens(self) -> float | None:
        """Output tokens returned to the run's requests, or None if the engine does not count them.

        Older records count the sampled rows instead, ``tokens.sampled``. A rejected draft had a
        row and gave no token. A row that overlapped steps computed for a request that had ended
        cannot be told apart; there is at most one per request.
        """
        if "tokens.output" in self.counters or "tokens.sampled" not in self.counters:
            return self.counters.get("tokens.output")
        rejected = self.counters.get("spec.drafted", 0.0) - self.counters.get("spec.accepted", 0.0)
        return self.counters["tokens.sampled"] - rejected

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types, in the schema's order."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        extra = body.pop("extra")
        body["cases"] = [dataclasses.asdict(case) for case in self.cases]
        return {"schema_version": SCHEMA_VERSION, "run": self.run, **body, **extra}


@dataclass(frozen=True, slots=True)
class Arm:
    """One resolved arm, as ``arms/ARM.json`` holds it."""

    name: str
    role: str
    overrides: Mapping[str, Any]
    # engine, model, workload and seed as JSON values. Without an engine, only workload and seed.
    config: Mapping[str, Any]
    identity: str = "none"  # the claim about the outputs, such as ``bitwise``
    engaged: tuple[str, ...] = ()  # claimed to be above 0, besides :attr:`engine_counter`
    all_served: bool = False  # whether the arm claims that no request is refused or fails
    out_of_memory: bool = False  # whether it claims that all its runs end with the outcome ``oom``
    # By metric, the limit that the arm must keep for the claim ``quality``.
    quality: Mapping[str, float] = field(default_factory=dict)
    # What the arm's process imports, if that differs from the study's own: python, requirements,
    # revision (the full hash of a commit) and its repository.
    environment: Mapping[str, Any] = field(default_factory=dict)
    # The digest of every file of the user's that the arm reads, by option; empty in older studies
    # (labkit.experiment.compose.input_digests).
    inputs: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # unknown keys of the file

    def __post_init__(self) -> None:
        require(self.role in ROLES, f"role {self.role!r}: must be one of: {', '.join(ROLES)}")
        parse_run_name(run_name(0, 0, self.name))

    @property
    def engine_counter(self) -> str | None:
        """The counter of the arm's engine, such as ``engine.paged``; None without an engine.

        Every arm with an engine claims that this counter is above 0.
        """
        engine = self.config.get("engine")
        if not isinstance(engine, Mapping) or "name" not in engine:
            return None
        return f"engine.{engine['name'].rpartition(':')[2]}"

    def accepts(self, record: Record) -> bool:
        """Return whether a run of the arm succeeded, or ran out of memory as the arm claims."""
        return record.ok or (self.out_of_memory and record.outcome == "oom")

    def to_json(self) -> dict[str, Any]:
        """Return the arm as JSON types."""
        return {
            "schema_version": SCHEMA_VERSION,
            "arm": self.name,
            "role": self.role,
            "overrides": dict(self.overrides),
            "config": dict(self.config),
            "claims": {
                "identity": self.identity,
                "engaged": list(self.engaged),
                # Only if it is claimed, so that arms of older studies compare as equal.
                **({"all_served": True} if self.all_served else {}),
                **({"out_of_memory": True} if self.out_of_memory else {}),
                **({"quality": dict(self.quality)} if self.quality else {}),
            },
            **({"environment": dict(self.environment)} if self.environment else {}),
            **({"inputs": dict(self.inputs)} if self.inputs else {}),
            **self.extra,
        }


# Fields of a record's environment that are equal on machines of the same kind. The host's name is
# not among them.
MACHINE_FIELDS = ("cpu_model", "cores", "memory_bytes", "os", "accelerator")
MEMORY_STEP_BYTES = 1 << 28  # memory is compared in steps of 256 MiB: kernels reserve a little


def machine_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Return the first machine field in which two environments differ, or None."""
    return next(
        (n for n in MACHINE_FIELDS if _comparable_value(n, a) != _comparable_value(n, b)), None
    )


def _comparable_value(name: str, environment: Mapping[str, Any]) -> Any:
    value = environment.get(name)
    return round(value / MEMORY_STEP_BYTES) if value and name == "memory_bytes" else value
