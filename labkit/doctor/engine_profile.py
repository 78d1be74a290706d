"""The profile of an engine: the time of each part of its steps, and bounds on what changes gain.

Short processes serve requests as a study does, with turns with clocks after the measurement. Every
share is a mean over processes with its 95 % interval. The largest gains are bounds, not forecasts:

    overlap     the host's work is hidden behind the model's, or the model's behind the host's
    buckets     the batch and the plan of a decode step whose shape differs from the step before
                cost nothing, as if a graph of that shape were replayed
    padding     the rows that hold no token cost nothing
    attention   attention costs nothing
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.analysis.comparison.step_parts import part_times, share_of, whole_us
from labkit.analysis.model.step_part_times import HOST, MODEL, PART_NAMES, PartShare
from labkit.config import Experiment, is_class_path, require
from labkit.config.option_index import override_key
from labkit.doctor.measurement_launcher import MeasurementError
from labkit.doctor.noise_pilots import Pilot
from labkit.records import Record

PROCESSES = 5
TIME_LIMIT_S = 40.0
HALF_PCT = 50.0
OVERRIDES = (
    "ablation=none", "design=quick", "design.control=false", "design.runs_per_block=1",
    "design.looks=[]", f"design.blocks={PROCESSES}", "design.timeout_s=60",
)  # fmt: skip
# Groups and options of a study, which is not what a profile is.
SET_HERE = ("ablation", "design", "experiment", "out", "plan", "redo", "scale")
# Used unless the command names another model or workload.
DEFAULTS = {"model": ["model=tiny"], "workload": ["workload=chat", "workload.num_requests=24"]}


@dataclass(frozen=True)
class EngineProfile:
    """The profile of an engine: shares of the time, means of counts, and largest gains.

    Percentages of decode steps are None without such steps.
    """

    processes: int
    shares: dict[str, PartShare]  # parts of a step; host, model, prefill (steps with prompt tokens)
    bound: str  # host, model or neither
    tokens_per_step: float
    reused_pct: float | None
    repeated_pct: float | None
    padded_pct: float
    gains: dict[str, PartShare]  # the largest increase of throughput (percent) by what brings it


def measure(overrides: Sequence[str], folder: Path) -> list[Record]:
    """Serve requests in short processes and return their records.

    Raises ``ConfigError`` if an override is wrong, or a profile has no use for it. Raises
    ``MeasurementError`` if a process failed, or the engine's steps have no clocks.
    """
    named = _checked_groups(overrides)
    defaults = [word for group, words in DEFAULTS.items() if group not in named for word in words]
    pilot = Pilot([*defaults, *overrides], folder, OVERRIDES, _check_steps)
    began = time.monotonic()
    for _ in range(PROCESSES):
        if pilot.fits(TIME_LIMIT_S - (time.monotonic() - began)):
            pilot.run()
    if pilot.failure is not None:
        raise MeasurementError(pilot.failure)
    if not all(record.known_notes.get("step_parts") for record in pilot.records):
        raise MeasurementError(f"{overrides[0]}: no clocks: its steps run elsewhere")
    return pilot.records


def _checked_groups(overrides: Sequence[str]) -> set[str]:
    """Return the groups that overrides set; refuse those that a profile sets itself."""
    from labkit.cli import hydra_arguments, multirun_composition

    groups = [re.split(r"[./]", override_key(word))[0] for word in overrides]
    for word, group in zip(overrides, groups, strict=True):
        require(
            group not in SET_HERE,
            f"{word}: a profile is of one engine, in a design of its own; leave it out",
        )
    words = [hydra_arguments.read_override(word) for word in overrides]
    multirun_composition.refuse_sweeps(words, "give a single value; a profile is of one engine")
    return set(groups)


def _check_steps(experiment: Experiment) -> None:
    """Refuse a workload without steps of an engine."""
    workload = experiment.workload
    require(
        workload.serves or is_class_path(workload.kind),
        f"workload={workload.name}: it serves no requests, so no engine takes steps",
    )


def profile(records: Sequence[Record]) -> EngineProfile:
    """Return the profile of an engine from the records of one arm."""
    runs = [part_times(record) for record in records]
    counters = [record.counters for record in records]

    def mean_pct(name: str, *of: str) -> float | None:
        pairs = [(c.get(name, 0.0), sum(c.get(each, 0.0) for each in of)) for c in counters]
        known = [100 * part / whole for part, whole in pairs if whole]
        return sum(known) / len(known) if known else None

    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in PART_NAMES}
    groups |= {"host": HOST, "model": MODEL, "built": ("build", "plan")}
    shares = {}
    for group, parts in groups.items():
        us = [sum(times.get(part, 0.0) for part in parts) for times in runs]
        if any(us):
            pct = [100 * own / whole_us(t) for own, t in zip(us, runs, strict=True)]
            shares[group] = share_of(group, us, pct)
    nothing = share_of("", [0.0], [0.0])
    host, model = (shares.get(group, nothing) for group in ("host", "model"))
    padded = mean_pct("tokens.padded", "tokens.padded", "tokens.computed") or 0.0
    repeated = mean_pct("shape.repeated", "shape.new", "shape.reused")
    changed = 0.0 if repeated is None else 1.0 - repeated / 100
    bounds = [one.part for one in (host, model) if (one.low_pct or 0.0) > HALF_PCT]
    steps = mean_pct("tokens.computed", "steps.total") or 0.0
    return EngineProfile(
        processes=len(records),
        shares={**shares, "prefill": _prefill_share(records)},
        bound=bounds[0] if bounds else "neither",
        tokens_per_step=steps / 100,
        reused_pct=mean_pct("shape.reused", "shape.new", "shape.reused"),
        repeated_pct=repeated,
        padded_pct=padded,
        gains={
            "overlap": _gain(min(host, model, key=lambda one: one.pct)),
            "buckets": _gain(shares.get("built", nothing), changed),
            "padding": _gain(model, padded / 100),
            "attention": _gain(shares.get("attention", nothing)),
        },
    )


def _gain(saved: PartShare, part: float = 1.0) -> PartShare:
    """Return the throughput gained (percent) if a part of a share of the time were saved."""

    def gain(pct: float) -> float:
        return 100.0 * (1.0 / max(1e-9, 1.0 - part * pct / 100.0) - 1.0)

    ends = (None if pct is None else gain(pct) for pct in (saved.low_pct, saved.high_pct))
    return PartShare(saved.part, saved.us * part, gain(saved.pct), *ends)


def _prefill_share(records: Sequence[Record]) -> PartShare:
    spent = [
        {kind: whole_us(parts) for kind, parts in note["parts_us"].items()}
        for note in (record.known_notes["step_parts"] for record in records)
    ]
    us = [kinds.get("prefill", 0.0) for kinds in spent]
    whole = [sum(kinds.values()) for kinds in spent]
    return share_of("prefill", us, [100 * u / w for u, w in zip(us, whole, strict=True)])
