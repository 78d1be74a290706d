"""What a cell will see and cost: by earlier studies here, else by what the doctor measured."""

from __future__ import annotations

from dataclasses import dataclass

from labkit import workload
from labkit.analysis.statistics.power import (
    blocks_needed,
    mde_pct,
    min_blocks_to_claim,
    one_minute_mde_pct,
)
from labkit.config import Device, Isolation
from labkit.experiment import doctor_noise, study_history
from labkit.experiment.cell import Cell
from labkit.experiment.cell_composer import ComposedCell
from labkit.experiment.doctor_noise import PilotNoise
from labkit.experiment.study_history import StudyHistory

WAYS = {Isolation.in_process: "in turns", Isolation.process: "in processes"}


def sees(cell: Cell, composed: ComposedCell, past: StudyHistory) -> str:
    """Say the smallest effect that gets a verdict, and how many blocks would see 1 %.

    With looks: at the best of them. A study that takes them all sees it at least as often.
    """
    design = cell.design
    few = design.blocks < min_blocks_to_claim(design.runs_per_block)
    known = _noise(cell, composed, past)
    if known is None:
        unknown = (
            "what it can see is not known: no earlier study of this workload here "
            "(python -m labkit.doctor measures this machine's noise)"
        )
        return f"estimate-only, too few blocks for a verdict; {unknown}" if few else unknown
    arms = max(1, sum(arm.role == "arm" for arm in composed.arms))
    # Without earlier rows: as if they had nothing in common (C. E. Bonferroni).
    each = (known.share or 1.0 / max(1, len(composed.experiment.workload.cases))) / arms
    stops = [(look.blocks, look.alpha) for look in design.looks] or [(design.blocks, design.alpha)]
    sights = [
        mde_pct(known.sd, blocks, design.runs_per_block, alpha * each) for blocks, alpha in stops
    ]
    need = blocks_needed(known.sd, design.runs_per_block, stops[-1][1] * each, 1.0)
    best = min((sight for sight in sights if sight is not None), default=None)
    least = "too few blocks for a verdict" if few or best is None else f"sees {best:.1f} % at best"
    more = "over 1000 blocks" if need is None else f"{need} blocks"
    return (
        f"{least}; {more} would see 1 % (adjusted for all rows and arms; noise of {known.source})"
    )


@dataclass(frozen=True)
class _Known:
    """Noise between runs (log scale), the share of an arm's alpha that a row has, and of whom."""

    sd: float
    share: float | None
    source: str


def _noise(cell: Cell, composed: ComposedCell, past: StudyHistory) -> _Known | None:
    for path, data in past.studies(composed):
        if (noise := study_history.noise(data)) is not None:
            return _Known(noise.sd, noise.share, str(path))
    sight = _doctors_sight(composed)
    if sight is not None:
        turns = cell.design.isolation is Isolation.in_process
        sd = sight.interleaved_sd if turns else sight.separate_sd
        return _Known(sd, None, _doctors_name(composed))
    measured = doctor_noise.load_noise_sd()
    if measured is None:
        return None
    return _Known(measured, None, "the doctor within one process; runs vary more")


def in_a_minute(composed: ComposedCell, past: StudyHistory) -> str:
    """Say what one minute sees in turns, where the arms can take turns, and in processes.

    One row alone, at alpha 0.05, in 80 of 100 studies.
    """
    apart = workload.apart(list(composed.experiments.values()))
    ways = [way for way in WAYS if apart is None or way is Isolation.process]
    seen = {way: found for way in ways if (found := _minute(composed, past, way)) is not None}
    if not seen:
        how = "python -m labkit.doctor estimates it" if _engines_on_cpu(composed) else "run it once"
        return f"what one minute sees is not known: no earlier study of this workload here ({how})"
    text = ", ".join(f"{words} {WAYS[way]}" for way, (words, _) in seen.items())
    missing = "".join(f"; {WAYS[way]}: not known" for way in ways if way not in seen)
    sources = " and ".join(dict.fromkeys(source for _, source in seen.values()))
    return f"one minute sees {text}{missing} (one row alone; noise of {sources})"


def _minute(composed: ComposedCell, past: StudyHistory, way: Isolation) -> tuple[str, str] | None:
    """Return the smallest effect that a minute sees, in words, and by whom it is known."""
    for path, data in past.studies(composed, way):
        noise, block_s = study_history.noise(data), study_history.block_s(path)
        if noise is not None and block_s is not None:
            runs = int(data["design"]["runs_per_block"])
            return _effect(one_minute_mde_pct(noise.sd, block_s, runs)), str(path)
    sight = _doctors_sight(composed)
    if sight is None:
        return None
    pct = sight.interleaved_pct if way is Isolation.in_process else sight.separate_pct
    return _effect(pct), _doctors_name(composed)


def _effect(pct: float | None) -> str:
    return "nothing, too few blocks fit," if pct is None else f"{pct:.1f} %"


def start_up(composed: ComposedCell, past: StudyHistory) -> str:
    """Say what a run costs beyond its measurement, from this machine's earlier records."""
    for path, _ in past.studies(composed):
        seconds = study_history.start_up(path)
        if seconds is not None:
            return f"start-up {seconds:.2f} s per run beyond its measurement ({path})"
    return "start-up per run: not measured yet"


def _doctors_sight(composed: ComposedCell) -> PilotNoise | None:
    """Return the doctor's sight of this kind of workload, or None: it knows engines on the CPU."""
    return doctor_noise.load_pilot_noise(_kind(composed)) if _engines_on_cpu(composed) else None


def _doctors_name(composed: ComposedCell) -> str:
    return f"the doctor's short {_kind(composed)}, estimated"


def _engines_on_cpu(composed: ComposedCell) -> bool:
    arms = composed.experiments.values()
    return all(a.workload.has_engine and a.engine.attention.device is Device.cpu for a in arms)


def _kind(composed: ComposedCell) -> str:
    kernel = composed.experiment.workload.times_kernels
    return "kernels" if kernel else "requests"
