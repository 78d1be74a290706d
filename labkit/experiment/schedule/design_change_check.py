"""Refuse to continue a cell whose arms, input files or design differ from those it began with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any

from labkit.config import ConfigError
from labkit.config.former_options import with_present_names
from labkit.experiment.cell import ALLOCATION, ReadyCell
from labkit.experiment.compose import resumed_legacy_cell
from labkit.experiment.compose.input_digests import input_digests, named_as_begun
from labkit.experiment.launch.python_environment import default_options, with_defaults
from labkit.experiment.schedule.cell_manifest import (
    FIXED_DESIGN_KEYS,
    has_manifest,
    new_manifest,
    old_design,
)
from labkit.records import DESIGN_FILE, Arm, RecordError, parse_run_name, read_arms, record_paths


def refuse_changes(cell: ReadyCell) -> None:
    """Check that the cell's folder does not hold different arms or a different design.

    Raises ``ConfigError`` if it does (only ``design.blocks`` may grow), or it holds a link.
    """
    refuse_links((cell.dir, *cell.dir.rglob("*")))
    if not (cell.dir / "arms").is_dir() and not has_manifest(cell):
        return
    try:
        difference = _difference(cell)
    except RecordError as error:
        raise ConfigError(f"{error}; set another folder, out=NAME") from None
    if difference:
        raise ConfigError(f"{cell.dir}: {difference}; set another folder, out=NAME")


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise ``ConfigError`` if a study's file or folder is a link: to a file of somebody else."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link, and labkit writes a study to regular files only; remove it, or "
                "set another folder, out=NAME"
            )


def _difference(cell: ReadyCell) -> str | None:
    if _is_lost(cell):
        return "cell.json was lost, and with it the declared design; restore it from a copy"
    old = {arm.name: arm for arm in read_arms(cell.dir)}
    new = {arm.name: arm for arm in cell.arms}
    if not has_manifest(cell):  # killed before all arms and the manifest were written
        new = {name: arm for name, arm in new.items() if name in old}
    defaults = default_options()
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"arm {name} was removed"
        if name not in old:
            return f"arm {name} was added"
        before, now = (_comparable(arms[name], defaults) for arms in (old, new))
        if change := first_difference(before, now) or _changed_input(old[name], new[name]):
            return f"arm {name}: {change}"
    return _design_difference(cell)


def _is_lost(cell: ReadyCell) -> bool:
    """Return whether the cell has runs, but not the manifest that was written before them.

    A report of an earlier version may have inferred one from the runs. Only a first block that is
    timed (``design.time``) runs before the manifest: its cell has an allocation, or no
    ``design.json`` yet.
    """
    if has_manifest(cell):
        return old_design(cell).get("declared") is False
    blocks = {parse_run_name(path.stem)[0] for path in record_paths(cell.dir)}
    timed = (cell.dir / ALLOCATION).exists() or not (cell.dir / DESIGN_FILE).exists()
    return max(blocks, default=-1) >= (1 if timed else 0)


def _comparable(arm: Arm, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an arm without its inputs, and with the options of this version."""
    config = with_present_names(arm.config)
    parts = {key: with_defaults(part, defaults.get(key)) for key, part in config.items()}
    return dataclasses.replace(arm, config=parts, inputs={}).to_json()


def _changed_input(old: Arm, new: Arm) -> str | None:
    """Return the first of an arm's files that differs from the file it began with, or None."""
    if not old.inputs:  # an older version began it
        return None
    files = named_as_begun(old, input_digests(new.config, new.environment))
    for name in sorted(old.inputs.keys() | files.keys()):
        before, now = old.inputs.get(name, "absent"), files.get(name, "absent")
        if before != now:
            return (
                f"the file of {name} was changed: its SHA-256 was {before}... when the study "
                f"began, now {now}..."
            )
    return None


def refuse_changed_inputs(cell: ReadyCell) -> None:
    """Raise ``ConfigError`` if a file that an arm reads has changed since the cell began."""
    arms = {arm.name: arm for arm in read_arms(cell.dir)}
    for arm in cell.arms:
        change = _changed_input(arms[arm.name], arm) if arm.name in arms else None
        if change:
            raise ConfigError(f"{cell.dir}: arm {arm.name}: {change}; restore it to continue")


def _design_difference(cell: ReadyCell) -> str | None:
    old, new = old_design(cell), new_manifest(cell, cell.design.blocks)["design"]
    for key in FIXED_DESIGN_KEYS:
        if key in old and not (_same_looks if key == "looks" else eq)(old[key], new[key]):
            name = {"seed": "seed", "metrics": "ablation.metric"}.get(key, f"design.{key}")
            return f"{name} was {old[key]}, now {new[key]}{_older_blocks(key, cell, old)}"
    if old.get("blocks", 0) > new["blocks"]:
        return (
            f"design.blocks was {old['blocks']}, now {new['blocks']}: blocks can only be added"
            f" (set design.blocks={_last_block(old)} to continue this study)"
        )
    return None


def _last_block(design: Mapping[str, Any]) -> int:
    """Return the number of blocks of a manifest's design, not only those up to its next look."""
    looks = design.get("looks")
    return int(looks[-1]["blocks"] if looks else design.get("blocks", 0))


def _older_blocks(key: str, cell: ReadyCell, old: Mapping[str, Any]) -> str:
    """Return a hint if an earlier version may have begun the cell, with twice ``design.blocks``."""
    blocks, end = cell.design.blocks, _last_block(old)
    doubled = end == resumed_legacy_cell.RUNS_PER_BLOCK * blocks
    if key != "looks" or not cell.design.isolation.takes_turns or not doubled:
        return ""
    return (
        f" (if an older version of labkit began this study with design.blocks={blocks}, set "
        f"design.blocks={end})"
    )


def _same_looks(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether two lists of looks agree. The last look may move if ``design.blocks`` grew."""
    last_blocks = [looks[-1]["blocks"] if looks else math.inf for looks in (old, new)]
    if last_blocks[0] == last_blocks[1]:
        return list(old) == list(new)
    end = min(last_blocks)
    early = [[look for look in looks if look["blocks"] < end] for looks in (old, new)]
    return early[0] == early[1]


def first_difference(old: Any, new: Any, path: str = "") -> str | None:
    """Return the first difference of two JSON values (``engine.blas was x, now y``), or None."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            key_path = f"{path}.{key}" if path else str(key)
            if key not in new:
                return f"{key_path} was {old[key]}, now it is not set"
            if key not in old:
                return f"{key_path} was not set, now {new[key]}"
            if change := first_difference(old[key], new[key], key_path):
                return change
        return None
    if isinstance(old, list) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        changes = (first_difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
        return next(filter(None, changes), None)
    return None if old == new else f"{path} was {old}, now {new}"
