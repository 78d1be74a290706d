"""Where the time of an engine's steps goes, and what changes of it can bring at most.

Short processes serve requests as a study does, with turns with clocks after the measurement. Every
number is a mean over processes with its 95 % interval. The largest gains are bounds, not forecasts:

    overlap     the host's work is hidden behind the model's, or the model's behind the host's
    buckets     the batch and the plan of a decode step whose shape differs from the step before
                cost nothing, as if a graph of that shape were replayed
    padding     the rows and slots that hold no token cost nothing
    attention   attention costs nothing
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.analysis.comparison.step_parts import part_times, share_of
from labkit.analysis.model.time_model import HOST, MODEL, PartShare
from labkit.doctor.measurement_process import MeasurementError
from labkit.doctor.noise_pilots import Pilot
from labkit.records import Record

PROCESSES = 5
MIN_PROCESSES = 2  # with fewer there are no intervals
TIME_LIMIT_S = 40.0
HALF_PCT = 50.0
OVERRIDES = (
    "ablation=none",
    "design=quick",
    "design.control=false",
    "design.runs_per_block=1",
    "design.looks=[]",
    f"design.blocks={PROCESSES}",
    "design.timeout_s=60",
)
# Used unless the command names others.
DEFAULTS = {"model": "model=tiny", "workload": "workload=chat"}


@dataclass(frozen=True)
class EngineProfile:
    """The profile of an engine: shares of the time, facts about its steps, and largest gains.

    ``bound``: host, model or neither. ``prefill``: the share of the time in steps with prompt
    tokens. ``gains``: the largest increase of throughput in percent, by what brings it. Numbers of
    the steps are means over processes; ``None`` if there were no such steps.
    """

    processes: int
    shares: tuple[PartShare, ...]
    host: PartShare
    model: PartShare
    prefill: PartShare
    bound: str
    tokens_per_step: float
    reused_pct: float | None
    repeated_pct: float | None
    padded_pct: float
    gains: tuple[PartShare, ...]


def measure(overrides: Sequence[str], folder: Path) -> list[Record]:
    """Serve requests in short processes and return their records.

    Raises
    ------
    ConfigError
        An override is wrong.
    MeasurementError
        A process failed, or the engine's steps have no clocks.
    """
    named = {word.split("=")[0] for word in overrides}
    defaults = [word for group, word in DEFAULTS.items() if group not in named]
    few = ["workload.num_requests=24"] if not any(w.startswith("workload") for w in named) else []
    pilot = Pilot([*defaults, *few, *overrides], folder, OVERRIDES)
    began = time.monotonic()
    for _ in range(PROCESSES):
        if not pilot.fits(TIME_LIMIT_S - (time.monotonic() - began)):
            break
        pilot.run()
    if pilot.failure is not None:
        raise MeasurementError(pilot.failure)
    if not all(record.known_notes.get("step_parts") for record in pilot.records):
        raise MeasurementError(
            f"{overrides[0]}: its steps run in another process or library, or trace themselves, "
            "and have no clocks"
        )
    return pilot.records


def profile(records: Sequence[Record]) -> EngineProfile:
    """Return the profile of an engine from the records of one arm."""
    runs = [part_times(record) for record in records]
    counters = [record.counters for record in records]

    def share(name: str, parts: Sequence[str]) -> PartShare:
        us = [sum(times.get(part, 0.0) for part in parts) for times in runs]
        return share_of(
            name, us, [100 * u / sum(t.values()) for u, t in zip(us, runs, strict=True)]
        )

    def mean_pct(name: str, of: Sequence[str]) -> float | None:
        pairs = [(c.get(name, 0.0), sum(c.get(each, 0.0) for each in of)) for c in counters]
        known = [100 * part / whole for part, whole in pairs if whole]
        return sum(known) / len(known) if known else None

    names = [name for name in (*HOST, *MODEL, "idle", "stalls", "left_over")
             if any(name in times for times in runs)]  # fmt: skip
    host, model = share("host", HOST), share("model", MODEL)
    padded = mean_pct("tokens.padded", ("tokens.padded", "tokens.computed")) or 0.0
    shapes = ("shape.new", "shape.reused")
    repeated = mean_pct("shape.repeated", shapes)
    new_pct = 100.0 - (100.0 if repeated is None else repeated)
    return EngineProfile(
        processes=len(records),
        shares=tuple(share(name, (name,)) for name in names),
        host=host,
        model=model,
        prefill=_prefill_share(records),
        bound=_bound(host, model),
        tokens_per_step=sum(
            c.get("tokens.computed", 0.0) / max(1.0, c.get("steps.total", 0.0)) for c in counters
        )
        / len(counters),
        reused_pct=mean_pct("shape.reused", shapes),
        repeated_pct=repeated,
        padded_pct=padded,
        gains=(
            _gain("overlap", host if host.pct < model.pct else model),
            _gain("buckets", share("buckets", ("build", "plan")), new_pct / 100),
            _gain("padding", model, padded / 100),
            _gain("attention", share("attention", ("attention",))),
        ),
    )


def _bound(host: PartShare, model: PartShare) -> str:
    if host.low_pct is not None and host.low_pct > HALF_PCT:
        return "host"
    return "model" if model.low_pct is not None and model.low_pct > HALF_PCT else "neither"


def _gain(name: str, saved: PartShare, part: float = 1.0) -> PartShare:
    """Return the throughput gained (percent) if a part of a share of the time were saved."""

    def gain(pct: float | None) -> float | None:
        if pct is None:
            return None
        return 100.0 * (1.0 / max(1e-9, 1.0 - part * pct / 100.0) - 1.0)

    return PartShare(
        name, saved.us * part, gain(saved.pct) or 0.0, gain(saved.low_pct), gain(saved.high_pct)
    )


def _prefill_share(records: Sequence[Record]) -> PartShare:
    us, pct = [], []
    for record in records:
        spent = {
            kind: sum(parts.values())
            for kind, parts in record.known_notes["step_parts"]["parts_us"].items()
        }
        us.append(spent.get("prefill", 0.0))
        pct.append(100 * us[-1] / sum(spent.values()))
    return share_of("prefill", us, pct)
