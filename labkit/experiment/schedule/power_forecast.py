"""Power forecast: the smallest effect that a planned cell detects, and its start-up cost per run.

The noise comes from earlier studies of the same workload on this machine or, if there are none,
from the doctor's measurements.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit import workload
from labkit.analysis.statistics import power
from labkit.config import Device, Experiment, Isolation, count_text
from labkit.experiment.cell import ReadyCell
from labkit.experiment.compose.cell_composer import ComposedCell
from labkit.experiment.schedule import doctor_noise_cache, noise_history
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.experiment.schedule.noise_history import CellNoise, StudyHistory
from labkit.records.metric_registry import METRICS

ISOLATION_PHRASES = {
    Isolation.in_process: "interleaved",
    Isolation.live: "in processes that take turns",
    Isolation.process: "in separate processes",
}
TARGET_PCT = 1.0  # the plan gives the number of blocks that would detect this effect


def detectable_effect_line(cell: ReadyCell, composed: ComposedCell, history: StudyHistory) -> str:
    """Return a line with the smallest effect that the cell detects, and the blocks needed for 1 %.

    In a design with looks, the line has the smallest effect that any single look detects. The study
    detects this effect at least as often as the single look, because it takes all looks. The effect
    of a sweep is that by which a setting is told from the best.
    """
    design = cell.design
    if composed.metrics and all(
        name in METRICS and METRICS[name].computed for name in composed.metrics
    ):
        return f"computed, not timed: {', '.join(composed.metrics)} needs no test"
    too_few = design.blocks < power.min_blocks_to_claim(design.runs_per_block)
    known = _noise(cell, composed, history)
    if known is None:
        unknown = (
            "the smallest detectable effect is not known, because no study of this workload has "
            "run here (python -m labkit.doctor measures this machine's noise)"
        )
        return f"estimate-only, too few blocks for a verdict; {unknown}" if too_few else unknown
    noise, source, is_doctor_s = known
    arms = max(1, sum(arm.role == "arm" for arm in composed.arms))
    # Without an earlier study the rows count as independent tests (C. E. Bonferroni).
    cases = cell.rows_of(cell.cases)  # none where all requests are one row
    rows = max(1, len(cases)) * max(1, len(composed.metrics))
    share, level = noise.alpha_share or 1.0 / rows, power.attained_alpha
    if cell.sweep:  # the question is which setting is best
        share, level = 1.0 / rows, power.ranked_alpha
    looks = [(look.blocks, look.alpha) for look in design.looks if look.blocks <= design.blocks]
    looks = looks or [(design.blocks, design.alpha)]
    runs, sd_df = design.runs_per_block, noise.degrees_of_freedom
    effects = [
        power.single_row_mde_pct(noise.sd, blocks, runs, alpha / arms, share, sd_df, level)
        for blocks, alpha in looks
    ]
    best = min((effect for effect in effects if effect is not None), default=None)
    detects = (
        "too few blocks for a verdict"
        if too_few or best is None
        else f"detects {best:.1f} % at best"
    )
    last = looks[-1][1] / arms
    needed = power.blocks_needed(noise.sd, runs, last, TARGET_PCT, share, sd_df, level)
    if needed is None and is_doctor_s:
        return (
            f"the smallest detectable effect is not known: noise of {100 * noise.sd:.0f} % "
            f"({source}) suggests a busy machine; run python -m labkit.doctor on an idle one"
        )
    blocks = "over 1000 blocks" if needed is None else count_text(needed, "block")
    return (
        f"{detects}; {blocks} would detect {TARGET_PCT:g} % "
        f"(adjusted for all rows and arms; noise from {source})"
    )


def _noise(
    cell: ReadyCell, composed: ComposedCell, history: StudyHistory
) -> tuple[CellNoise, str, bool] | None:
    """Return a cell's noise, its source, and whether that is the doctor; None if it is unknown."""
    for path, manifest in history.studies(composed, cell.design.isolation):
        if (noise := noise_history.cell_noise(manifest, composed.metrics)) is not None:
            return noise, history.source(path), False
    pilot = _pilot_noise(composed)
    if pilot is not None and cell.design.isolation is not Isolation.live:
        interleaved = cell.design.isolation is Isolation.in_process
        sd = pilot.interleaved_sd if interleaved else pilot.separate_sd
        return CellNoise(sd, None, pilot.degrees_of_freedom), _pilot_name(composed), True
    noise_sd = doctor_noise_cache.load_noise_sd()
    if noise_sd is None or not _is_pilot_metric(composed):
        return None
    return CellNoise(noise_sd, None, None), "the doctor, within one process; runs vary more", True


def one_minute_line(composed: ComposedCell, history: StudyHistory) -> str:
    """Return a line with the smallest effects that one minute detects, for each isolation.

    Each effect is for a single row, at alpha 0.05 and a power of 80 %.
    """
    isolations = _possible_isolations(list(composed.experiments.values()))
    effects = {
        isolation: effect
        for isolation in isolations
        if (effect := _one_minute_effect(composed, history, isolation)) is not None
    }
    if not effects:
        how = "python -m labkit.doctor estimates it" if _engines_on_cpu(composed) else "run it once"
        return (
            "what one minute detects is not known, because no study of this workload has run here "
            f"({how})"
        )
    known = ", ".join(f"{effect} {ISOLATION_PHRASES[i]}" for i, (effect, _) in effects.items())
    unknown = "".join(
        f"; {ISOLATION_PHRASES[i]}: not known" for i in isolations if i not in effects
    )
    sources = " and ".join(dict.fromkeys(source for _, source in effects.values()))
    return f"one minute detects {known}{unknown} (one row alone; noise from {sources})"


def _possible_isolations(arms: Sequence[Experiment]) -> list[Isolation]:
    """Return the isolations to forecast: in turns, if the arms allow it, and separate processes."""
    if workload.apart(arms) is None:
        return [Isolation.in_process, Isolation.process]
    live = workload.not_live(arms) is None
    return [Isolation.live, Isolation.process] if live else [Isolation.process]


def _one_minute_effect(
    composed: ComposedCell, history: StudyHistory, isolation: Isolation
) -> tuple[str, str] | None:
    """Return the smallest effect that one minute detects and the source of its noise, if known."""
    for path, manifest in history.studies(composed, isolation):
        noise = noise_history.cell_noise(manifest, composed.metrics)
        block_s = noise_history.median_block_s(path)
        if noise is not None and block_s is not None:
            runs = int(manifest["design"]["runs_per_block"])
            effect = power.one_minute_mde_pct(noise.sd, block_s, runs, noise.degrees_of_freedom)
            return _effect_text(effect), history.source(path)
    pilot = _pilot_noise(composed)
    if pilot is None or isolation is Isolation.live:  # the doctor has no pilot of live processes
        return None
    effect = pilot.interleaved_pct if isolation is Isolation.in_process else pilot.separate_pct
    return _effect_text(effect), _pilot_name(composed)


def _effect_text(effect_pct: float | None) -> str:
    return "nothing (too few blocks fit)" if effect_pct is None else f"{effect_pct:.1f} %"


def start_up_line(cell: ReadyCell, composed: ComposedCell, history: StudyHistory) -> str:
    """Return a line with the seconds that a run takes outside its measurement."""
    for path, _ in history.studies(composed, cell.design.isolation):
        if (seconds := noise_history.median_start_up_s(path)) is not None:
            source = history.source(path)
            return f"start-up: {seconds:.2f} s of a run are outside its measurement ({source})"
    return "start-up per run: not measured yet"


def _pilot_noise(composed: ComposedCell) -> PilotNoise | None:
    """Return the noise of the doctor's pilot study: of speed, for engines on the CPU; or None."""
    if not _engines_on_cpu(composed) or not _is_pilot_metric(composed):
        return None
    return doctor_noise_cache.load_pilot_noise(_workload_kind(composed))


def _is_pilot_metric(composed: ComposedCell) -> bool:
    """Return whether the cell's metrics are speeds, as the doctor measures no others."""
    names = composed.metrics
    return bool(names) and all(name in METRICS and METRICS[name].is_speed for name in names)


def _pilot_name(composed: ComposedCell) -> str:
    return f"the doctor's short {_workload_kind(composed)}, estimated"


def _engines_on_cpu(composed: ComposedCell) -> bool:
    arms = composed.experiments.values()
    return all(a.workload.has_engine and a.engine.attention.device is Device.cpu for a in arms)


def _workload_kind(composed: ComposedCell) -> str:
    return "kernels" if composed.experiment.workload.times_kernels else "requests"
