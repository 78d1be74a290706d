"""The manifest of a cell, ``cell.json``: its arms and design, and the interim looks taken.

The analysis adds its results to the same file (:mod:`labkit.analysis`). A sequential study ends
early only at a predeclared look at which every comparison is decided. The looks, and the share of
alpha that each spends, are fixed before the first run (:class:`labkit.config.PlannedLook`);
:mod:`labkit.analysis.statistics.interim_analysis` says why that is sound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from labkit.analysis.statistics.text_window_intervals import LOOK_CONFIDENCE
from labkit.config import count_text, to_plain
from labkit.experiment.cell import ReadyCell
from labkit.experiment.compose.input_digests import input_digests
from labkit.records import (
    SCHEMA_VERSION,
    Record,
    publish_arm,
    publish_design,
    read_cell,
    write_json,
)

# Keys of the design that must not change in an existing folder; ``blocks`` may only grow.
FIXED_DESIGN_KEYS = (
    "isolation",
    "seed",
    "runs_per_block",
    "control",
    "alpha",
    "margin_pct",
    "looks",
    "metrics",
    "eliminate",
)


class LookAnalysis(Protocol):
    """Analyses a cell at a look: :class:`labkit.analysis.studies.study_analysis.AnalysisCache`."""

    def undecided_cases(self, cell_dir: Path) -> Collection[str]: ...
    def limits_decided(
        self, arms: Sequence[str], records: Sequence[Record], limits: Mapping[str, float]
    ) -> bool: ...
    def possibly_best(self, cell_dir: Path) -> Sequence[str]: ...
    def decided_rows(
        self, cell_dir: Path, cases: Collection[str]
    ) -> Sequence[Mapping[str, str]]: ...


def has_manifest(cell: ReadyCell) -> bool:
    """Return whether the cell's manifest was written."""
    return (cell.dir / "cell.json").exists()


def old_design(cell: ReadyCell) -> Mapping[str, Any]:
    """Return the design in the cell's manifest; empty before the manifest is written."""
    design: Mapping[str, Any] = read_cell(cell.dir)["design"] if has_manifest(cell) else {}
    return design


def new_manifest(cell: ReadyCell, blocks: int) -> dict[str, Any]:
    """Return a cell's manifest before the analysis, with all its keys but without results.

    ``blocks``: the number of blocks planned so far. If the design has looks, these are the blocks
    up to the next look, otherwise all blocks.
    """
    unclaimed = {"status": "unclaimed", "reasons": []}
    return {
        "schema_version": SCHEMA_VERSION,
        "cell": cell.name,
        "question": cell.question,
        "scale": cell.scale,
        "arms": [
            {"name": a.name, "role": a.role, "overrides": dict(a.overrides), "counters": {}}
            for a in cell.arms
        ],
        "design": {
            "seed": cell.seed,
            "blocks": blocks,
            "runs_per_block": cell.design.runs_per_block,
            "control": cell.design.control,
            "order": "permuted_blocks",
            "isolation": cell.design.isolation.value,
            "across_hosts": cell.design.across_hosts,
            "eliminate": cell.design.eliminate,
            "looks": [to_plain(look) for look in cell.design.looks],
            "alpha": cell.design.alpha,
            "margin_pct": cell.design.margin_pct,
            "metrics": list(cell.metrics),
            **({"time_s": cell.design.time} if cell.timed else {}),
            **({"estimates": _rows_of_estimates(cell, cell.estimates)} if cell.estimates else {}),
            **({"units": cell.units} if cell.units is not None else {}),
            **({"quality_confidence": LOOK_CONFIDENCE} if cell.window_looks else {}),
        },
        "identity": cell.arms[0].identity,
        "gates": {name: dict(unclaimed) for name in ("healthy", "engaged", "identical")},
        "rows": [],
        "failures": [],
        "environment": {},
        "published": cell.published,
        "overrides": list(cell.overrides),
        **({"config_dirs": list(cell.config_dirs)} if cell.config_dirs else {}),
        **({"sweep": dict(cell.sweep), "best": []} if cell.sweep else {}),
    }


def estimates_in_manifest(cell: ReadyCell) -> Mapping[str, float]:
    """Return the cases out of reach in the cell's manifest, with the seconds they would take."""
    estimates: Mapping[str, float] = old_design(cell).get("estimates", {})
    return {case: seconds for row, seconds in estimates.items() for case in cell.cases_of([row])}


def _rows_of_estimates(cell: ReadyCell, estimates: Mapping[str, float]) -> dict[str, float]:
    return {row: seconds for case, seconds in estimates.items() for row in cell.rows_of([case])}


def write_estimates(cell: ReadyCell, estimates: Mapping[str, float]) -> None:
    """Replace the cases out of reach in the cell's manifest, if they have changed."""
    if set(estimates) != set(estimates_in_manifest(cell)):
        manifest = read_cell(cell.dir)
        manifest["design"]["estimates"] = _rows_of_estimates(cell, estimates)
        write_json(cell.dir / "cell.json", manifest)


def write_manifest(cell: ReadyCell, blocks: int) -> None:
    """Write ``arms/*.json`` and ``cell.json``, each only if it is absent or must change.

    ``blocks``: see :func:`new_manifest`. A larger number in the existing manifest stays. The
    question and the published numbers are those of the last command: a correction of them changes
    nothing that was measured. Raises ``OSError`` if the folder can't be written.
    """
    write_arms(cell)
    old = old_design(cell)
    across_hosts_changed = old.get("across_hosts", False) != cell.design.across_hosts
    if old.get("blocks", 0) < blocks or across_hosts_changed:
        manifest = new_manifest(cell, max(blocks, old.get("blocks", 0)))
        manifest["design"] |= {key: old[key] for key in ("looks_taken", "estimates") if key in old}
        if old and "metrics" not in old:  # an older version began it: the records name the metric
            del manifest["design"]["metrics"]
        manifest["design"]["shown"] = blocks_when_shown(cell)
        if not has_manifest(cell):
            fixed = {key: manifest["design"][key] for key in FIXED_DESIGN_KEYS}
            publish_design(cell.dir, fixed)
        write_json(cell.dir / "cell.json", manifest)
        return
    manifest, facts = read_cell(cell.dir), {"question": cell.question, "published": cell.published}
    if any(manifest.get(key) != value for key, value in facts.items()):
        write_json(cell.dir / "cell.json", {**manifest, **facts})


def move_last_look(cell: ReadyCell) -> None:
    """Write the blocks and looks of a cell whose last look comes earlier than planned."""
    manifest, planned = read_cell(cell.dir), new_manifest(cell, cell.design.blocks)["design"]
    manifest["design"] |= {key: planned[key] for key in ("blocks", "looks")}
    publish_design(cell.dir, {key: planned[key] for key in FIXED_DESIGN_KEYS})
    write_json(cell.dir / "cell.json", manifest)


def write_arms(cell: ReadyCell) -> None:
    """Write the arms' files, each only if it is absent, and make the folder of pending records."""
    paths = cell.paths
    for folder in (paths.arms, paths.pending):
        folder.mkdir(parents=True, exist_ok=True)
    for arm in cell.arms:
        path = paths.arm(arm.name)
        if path.exists():
            continue
        inputs = input_digests(arm.config, arm.environment)
        arm = dataclasses.replace(arm, inputs=inputs)
        if path.parent == cell.dir / "arms":
            publish_arm(cell.dir, arm)
        else:
            write_json(path, arm.to_json())


def blocks_when_shown(cell: ReadyCell) -> list[int]:
    """Return the numbers of blocks after which the cell's results were shown.

    The analysis adds a number to ``cell.json`` when it writes the results of a finished cell; those
    of an older manifest without numbers count as shown after its last block.
    """
    if not has_manifest(cell):
        return []
    manifest = read_cell(cell.dir)
    unnoted = [manifest["design"]["blocks"]] if manifest["rows"] else []
    return [int(blocks) for blocks in manifest["design"].get("shown", unnoted)]


def exploratory_warning(cell: ReadyCell) -> str | None:
    """Return a warning if blocks are added to a cell whose results were already shown, or None.

    Results that were shown at an interim look do not count.
    """
    looks = [look.blocks for look in cell.design.looks]
    shown = [n for n in blocks_when_shown(cell) if n < cell.design.blocks and n not in looks]
    if not shown:
        return None
    return (
        f"results were shown after {count_text(shown[0], 'block')}, so a study of "
        f"{cell.design.blocks} blocks is exploratory and claims nothing; for a claim, start a new "
        f"study (another out=) with design.looks at {shown[0]} and {cell.design.blocks} blocks"
    )


def kept_arms(cell: ReadyCell) -> dict[int, list[str]]:
    """Return the names of the arms that remain after each look (its blocks) that dropped arms."""
    taken = old_design(cell).get("looks_taken", [])
    return {int(look["blocks"]): list(look["kept"]) for look in taken if "kept" in look}


def take_interim_look(
    cell: ReadyCell,
    blocks: int,
    records: list[Record],
    analysis: LookAnalysis | None,
) -> bool:
    """Take the look after ``blocks`` blocks, if the design has one; return whether the cell ends.

    The cell ends if no case that is still measured is undecided. The look, which is added to
    ``cell.json``, lists the decided ones, which stop, those that were only estimated, which it has
    not tested, and with ``design.eliminate`` the arms that may be the best, baseline and control.
    If an earlier command ran later blocks, the look's recorded result stays.
    """
    look = next((look for look in cell.design.looks if look.blocks == blocks), None)
    if look is None or any(record.block >= blocks for record in records):
        return False
    if analysis is None:
        raise ValueError(f"cell {cell.name}: its design has looks, but analysis is None")
    undecided = set(cell.cases_of(analysis.undecided_cases(cell.dir)))
    plan = cell.plan(blocks)
    measured = undecided if plan is None else set(cell.plans[0].rounds)
    estimates = set(estimates_in_manifest(cell))
    measured -= estimates
    running, last = measured & undecided, blocks >= cell.design.blocks
    manifest = read_cell(cell.dir)
    old_looks = manifest["design"].get("looks_taken")
    taken = [item for item in old_looks or [] if item["blocks"] < blocks]
    decided = not running
    result: dict[str, Any] = {"blocks": look.blocks, "alpha": look.alpha, "decided": decided}
    if estimates:
        result["estimates"] = sorted(cell.rows_of(estimates))
    if cell.design.eliminate and not decided and not last:
        result["kept"] = _remaining_arms(cell, taken, analysis)
    if plan is not None and not decided and not last:
        stopped = measured - running - _stopped_cases(cell, taken)
        result["stopped"] = sorted(cell.rows_of(stopped))
    taken.append(result)
    if old_looks != taken:
        manifest["design"]["looks_taken"] = taken
        write_json(cell.dir / "cell.json", manifest)
    return decided


def _remaining_arms(
    cell: ReadyCell, taken: Sequence[Mapping[str, Any]], analysis: LookAnalysis
) -> list[str]:
    """Return the arms that a look keeps: baseline, control, and those that may be the best."""
    remaining = set(analysis.possibly_best(cell.dir))
    before = next((look["kept"] for look in reversed(taken) if "kept" in look), None)
    arms = [arm for arm in cell.arms if before is None or arm.name in before]
    return [arm.name for arm in arms if arm.role != "arm" or arm.name in remaining]


def stopped_cases(cell: ReadyCell, block: int) -> set[str]:
    """Return the cases that looks before a block have decided."""
    taken = old_design(cell).get("looks_taken", [])
    return _stopped_cases(cell, [look for look in taken if look["blocks"] <= block])


def _stopped_cases(cell: ReadyCell, taken: Iterable[Mapping[str, Any]]) -> set[str]:
    return set(cell.cases_of(row for look in taken for row in look.get("stopped", ())))


def ended_at_look(cell: ReadyCell) -> int | None:
    """Return the number of blocks after which a look has ended the cell; None: none has.

    A last look ends nothing any longer once it has moved, because ``design.blocks`` grew.
    """
    taken = old_design(cell).get("looks_taken", [])
    if not taken or not taken[-1]["decided"]:
        return None
    blocks = int(taken[-1]["blocks"])
    return blocks if any(look.blocks == blocks for look in cell.design.looks) else None
