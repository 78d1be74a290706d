"""What one minute sees of a cell's question: by earlier studies here, else by the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit import workload
from labkit.analysis.statistics.power import minute_pct
from labkit.config import Device, Isolation, WorkloadKind
from labkit.experiment import doctor_noise, history
from labkit.experiment.arms import ComposedCell
from labkit.experiment.doctor_noise import Sight

WAYS = {Isolation.in_process: "in turns", Isolation.process: "in processes"}


@dataclass(frozen=True)
class Seen:
    """The smallest effect that a minute sees, in percent (None: it is too short), and of whom."""

    pct: float | None
    source: str


def sentence(composed: ComposedCell, out: Path) -> str:
    """Say what one minute sees in turns, where the arms can take turns, and in processes.

    One row alone, at alpha 0.05, in 80 of 100 studies.
    """
    apart = workload.apart(list(composed.experiments.values()))
    ways = [way for way in WAYS if apart is None or way is Isolation.process]
    seen = {way: found for way in ways if (found := _seen(composed, out, way)) is not None}
    if not seen:
        how = "python -m labkit.doctor estimates it" if _on_cpu(composed) else "run it once"
        return f"what one minute sees is not known: no earlier study of this workload here ({how})"
    text = ", ".join(f"{_words(seen[way])} {WAYS[way]}" for way in seen)
    missing = "".join(f"; {WAYS[way]}: not known" for way in ways if way not in seen)
    sources = " and ".join(dict.fromkeys(found.source for found in seen.values()))
    return f"one minute sees {text}{missing} (one row alone; noise of {sources})"


def _words(seen: Seen) -> str:
    return "nothing, too few blocks fit," if seen.pct is None else f"{seen.pct:.1f} %"


def _seen(composed: ComposedCell, out: Path, way: Isolation) -> Seen | None:
    """Ask the newest earlier study that knows its noise and what a block costs."""
    for path, data in history.studies(composed, out, way):
        noise, block_s = history.noise(data), history.block_s(path)
        if noise is not None and block_s is not None:
            runs = int(data["design"]["runs_per_block"])
            return Seen(minute_pct(noise.sd, block_s, runs), str(path))
    sight = doctors(composed)
    if sight is None:
        return None
    pct = sight.turns_pct if way is Isolation.in_process else sight.processes_pct
    return Seen(pct, doctors_name(composed))


def doctors(composed: ComposedCell) -> Sight | None:
    """Return the doctor's sight of this kind of workload, or None: it knows the CPU alone."""
    return doctor_noise.find_sight(_kind(composed)) if _on_cpu(composed) else None


def doctors_name(composed: ComposedCell) -> str:
    """Return what the noise of :func:`doctors` is called."""
    return f"the doctor's short {_kind(composed)}, estimated"


def _on_cpu(composed: ComposedCell) -> bool:
    return all(arm.engine.attention.device is Device.cpu for arm in composed.experiments.values())


def _kind(composed: ComposedCell) -> str:
    kernel = composed.experiment.workload.kind is WorkloadKind.kernel
    return "kernels" if kernel else "requests"
