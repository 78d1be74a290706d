"""The command that would answer what a cell leaves open."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.verdict import blocks_to_decide
from labkit.analysis.statistics.power import min_blocks_to_claim
from labkit.config import count_text

SIMPLE_OVERRIDE = r"[a-z_.]+=(?!.*__)[A-Za-z0-9_.+-]+"  # only characters that cell names keep
DESIGN_SIZE = ("design.blocks=", "design.looks=", "design.time=")
MAX_BLOCKS = 200  # in a proposed command; more would take days
MAX_TIME_S = 3600.0  # likewise


@dataclass(frozen=True)
class NextCommand:
    """A command, and what it is for (a clause)."""

    command: str
    purpose: str


def next_command(analysis: CellAnalysis) -> NextCommand | None:
    """Return the command that finishes, repairs or decides a cell, or None.

    None if the cell's question is answered, if no affordable number of blocks would answer it (also
    because a gate fails for every arm), if that number is not known, as in a sweep, or if the
    cell's overrides are not recorded.
    """
    overrides = _overrides(analysis)
    if not overrides or analysis.all_computed:
        return None
    if not analysis.data.complete:
        continued = [*overrides, "out=THIS_FOLDER"]
        return _command(analysis, continued, "run the blocks that are missing")
    arms = {arm.name: arm for arm in analysis.data.arms}
    if not all(arms[record.arm].accepts(record) for record in analysis.data.records):
        repaired = [*overrides, "out=THIS_FOLDER", "redo=failed"]
        purpose = "run failed blocks again, after repairing the cause"
        return _command(analysis, repaired, purpose)
    if all(analysis.causes(arm) for arm in analysis.data.treatment_arms):
        return _without_identity(analysis, overrides)  # more blocks do not repair a failed gate
    if len(analysis.data.blocks_done) < min_blocks_to_claim(analysis.data.criteria.runs):
        size = ("design=", "design.runs_per_block=", *DESIGN_SIZE)
        kept = [o for o in overrides if not o.lstrip("+~").startswith(size)]
        return _command(analysis, [*kept, "design=standard"], "run enough blocks for a verdict")
    if analysis.data.sweep:
        return None  # how many blocks leave one best setting is not known
    return _more_blocks(analysis, overrides)


def _without_identity(analysis: CellAnalysis, overrides: Sequence[str]) -> NextCommand | None:
    """Return the command that drops the default claim of identity if that alone failed."""
    chosen = ("ablation=", "ablation.claims", "experiment=")
    failed = [name for name, gate in analysis.gates.items() if gate.status == "fail"]
    named = [o for o in overrides if o != "ablation=none" and o.lstrip("+~").startswith(chosen)]
    if failed != ["identical"] or named:
        return None
    without = [*overrides, "ablation.claims.identity=none"]
    return _command(analysis, without, "compare arms whose outputs may differ")


def _overrides(analysis: CellAnalysis) -> Sequence[str]:
    """Return a cell's overrides, of older manifests by its name; empty if that cannot be parsed."""
    recorded: Sequence[str] | None = analysis.data.manifest.get("overrides")
    if recorded is not None:
        return recorded
    parts = analysis.name.split(",")
    return parts if all(re.fullmatch(SIMPLE_OVERRIDE, part) for part in parts) else ()


def _more_blocks(analysis: CellAnalysis, overrides: Sequence[str]) -> NextCommand | None:
    """Return the command of a study that decides undecided primary rows, or None if none can.

    It fixes the blocks, because more time gives a design that fixes them no more, and kernels at
    most 24. Where the requests of a run have followed from the time, the blocks do, too: runs of a
    fixed number of blocks serve all requests.
    """
    data = analysis.data
    undecided = [
        one
        for row in analysis.cell.primary_rows
        for one in row.comparisons
        if one.arm in data.treatment_arms and one.verdict == "inconclusive"
        if (one.p_adjusted or 0.0) > data.criteria.alpha  # the noise is the only reason
    ]
    needs = [blocks_to_decide(one, data.criteria) for one in undecided]
    known = [need for need in needs if need is not None and need <= MAX_BLOCKS]
    done, time_s = len(data.blocks_done), data.design.time_s
    estimates = {case: s for case, s in data.design.estimates.items() if s <= MAX_TIME_S}
    if known and max(known) <= done:
        known = []
    size = list[str]()
    if time_s is not None and (known or estimates):
        affordable = [need for need in known if need * time_s / done <= MAX_TIME_S]
        known = affordable or ([min(known)] if known else [])
        needed_s = max(known, default=done) * time_s / done + sum(estimates.values())
        size = [f"design.time={math.ceil(needed_s / 60)}m"]
    if known:
        blocks = max(known) if data.design.units is None else 0
        size = [f"design.blocks={blocks}", "design.looks=[]", *size]
    if not size:
        return None
    kept = [o for o in overrides if not o.startswith(DESIGN_SIZE)]
    noun = "row" if len(data.treatment_arms) == 1 else "comparison"
    open_rows = [count_text(len(known), f"undecided {noun}")] if known else []
    open_rows += [count_text(len(estimates), "estimate")] if estimates else []
    far = len(needs) - len(known)
    more = f"; {far} would need far more" if known and far else ""
    purpose = f"decide {' and '.join(open_rows)} in a new study{more}"
    return _command(analysis, [*kept, *size], purpose)


def _command(analysis: CellAnalysis, overrides: Sequence[str], purpose: str) -> NextCommand:
    folders = analysis.data.manifest.get("config_dirs", ())
    words = [word for folder in folders for word in ("--config-dir", folder)]
    return NextCommand(f"python -m labkit {shlex.join([*words, *overrides])} -m", purpose)
