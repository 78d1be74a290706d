"""Arms: compose every arm of every cell with Hydra, and check them all before any runs.

A cell is given by its overrides. Each arm is the same cell with the arm's own overrides
behind, so an arm wins over the command line. Hydra is needed here and nowhere below: an
arm leaves as what its file will hold, with its config as plain dataclasses beside it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.config import (
    CONTROL,
    ConfigError,
    Design,
    Experiment,
    Isolation,
    own_classes,
    require,
    to_plain,
)
from labkit.experiment import claim_validation, published_rows
from labkit.experiment.cell import Cell
from labkit.experiment.hydra_composer import Composer, hydra_quote
from labkit.records import PROCESSES_SUFFIX, Arm

CONFIG = ("engine", "model", "workload", "seed")  # what an arm's file holds of its config
OF_AN_ENGINE = ("engine", "model")  # and does not where no engine is asked
UNNAMED = ("out", "plan", "redo", "design.blocks")


@dataclass(frozen=True)
class ComposedCell:
    """A cell: the name of its folder, its config and its arms, the baseline first.

    ``experiments``: each arm's config. ``isolation``: where the runs happen, decided.
    ``apart``: why not in one process.
    """

    name: str
    experiment: Experiment
    arms: tuple[Arm, ...]
    experiments: Mapping[str, Experiment]
    isolation: Isolation
    separate_processes_reason: str | None = None


def cell_name(task_overrides: Iterable[str]) -> str:
    """Name a cell's folder by its overrides (design.md section 4)."""
    named = sorted(o for o in task_overrides if o.lstrip("+~").split("=", 1)[0] not in UNNAMED)
    name = re.sub(r"[^A-Za-z0-9=,._+~-]", "_", ",".join(named)) or "default"
    if len(name) > 120:
        digest = hashlib.sha256(",".join(named).encode()).hexdigest()[:12]
        name = f"{name[:107]}-{digest}"
    return name


def compose_cell(
    hydra_overrides: Sequence[str],
    task_overrides: Sequence[str],
    composer: Composer | None = None,
) -> ComposedCell:
    """Compose and validate one cell with all its arms. Needs Hydra to be initialized.

    ``composer``: what cells share; None: nothing.

    Raises
    ------
    ConfigError
        In one line: the arm, the key and what is allowed.
    """
    composer = composer or Composer()
    cell = with_scale_overrides([*hydra_overrides, *task_overrides], composer)
    whole = composer.compose(cell)
    ablation = whole.ablation
    baseline = ablation.baseline_arm
    names = [baseline, *(name for name in ablation.arms if name != baseline)]
    experiments: dict[str, Experiment] = {}
    for name in names:
        overrides = ablation.arms[name]
        experiments[name] = composer.compose(_with_arm(cell, overrides), f"arm {name}: ")
        _check_arm(name, experiments[name], overrides)
    engines = {name: experiment.engine for name, experiment in experiments.items()}
    claim_validation.check(ablation.claims.engaged, engines, _dropped(cell))
    claim_validation.check_weights(ablation.claims.engaged, experiments)
    claim_validation.check_launches(ablation.claims.engaged, experiments)
    arms = [_arm(name, whole, experiments[name]) for name in names]
    if whole.design.control:
        arms.append(replace(arms[0], name=CONTROL, role="control"))
        experiments[CONTROL] = experiments[baseline]
    isolation, apart = resolve_isolation(whole.design, list(experiments.values()))
    name = cell_name(task_overrides)
    return ComposedCell(name, whole, tuple(arms), experiments, isolation, apart)


def with_scale_overrides(overrides: Sequence[str], composer: Composer) -> list[str]:
    """Return a cell's overrides with those of its experiment's scale in front, so that they win.

    Raises
    ------
    ConfigError
        The experiment has no such scale.
    """
    whole = composer.compose(overrides)
    given = {override.split("=", 1)[0] for override in overrides}
    scaled = whole.scales.get(whole.scale.value, {})
    # An arm may be new, and what it is given is new to it.
    add = {key: "++" if key.startswith("ablation.arms.") else "" for key in scaled}
    asked = [
        f"{add[key]}{key}={hydra_quote(value)}" for key, value in scaled.items() if key not in given
    ]
    return [*asked, *overrides]


def _arm(name: str, whole: Experiment, experiment: Experiment) -> Arm:
    ablation, plain = whole.ablation, to_plain(experiment)
    absent = () if experiment.workload.has_engine else OF_AN_ENGINE
    return Arm(
        name=name,
        role="baseline" if name == ablation.baseline_arm else "arm",
        overrides=to_plain(ablation.arms[name]),
        config={key: plain[key] for key in CONFIG if key not in absent},
        identity=ablation.claims.identity.value,
        engaged=tuple(ablation.claims.engaged.get(name, [])),
        all_served=ablation.claims.all_served,
    )


def resolve_isolation(
    design: Design, experiments: Sequence[Experiment]
) -> tuple[Isolation, str | None]:
    """Decide where the runs of these arms happen, and say why they are apart if they are.

    Raises
    ------
    ConfigError
        ``in_process`` was asked for and cannot be.
    """
    if design.isolation is Isolation.process:
        return Isolation.process, "design.isolation=process asks for it"
    from labkit import workload

    reason = workload.apart(experiments)
    if reason is None:
        return Isolation.in_process, None
    if design.isolation is Isolation.in_process:
        raise ConfigError(
            f"design.isolation=in_process: {reason}; set design.isolation=process, or leave auto"
        )
    return Isolation.process, reason


def to_cells(composed: ComposedCell, folder: Path) -> list[Cell]:
    """Turn a composed cell into what is run: itself, and what confirms it in processes.

    What the arms do to each other in one process, and what differs from process to process,
    is not in the turns; a few blocks of separate processes say whether it matters.
    """
    cell, confirm = to_cell(composed, folder), composed.experiment.design.confirm
    if not confirm or composed.isolation is not Isolation.in_process:
        return [cell]
    apart = replace(
        composed.experiment.design,
        isolation=Isolation.process,
        blocks=confirm,
        looks=[],
        confirm=0,
    )
    name = f"{folder.name}{PROCESSES_SUFFIX}"
    return [
        cell,
        replace(cell, dir=folder.with_name(name), name=cell.name + PROCESSES_SUFFIX, design=apart),
    ]


def to_cell(composed: ComposedCell, folder: Path) -> Cell:
    """Turn a composed cell into one that can be run in ``folder``."""
    whole = composed.experiment
    return Cell(
        dir=folder,
        name=composed.name,
        arms=composed.arms,
        design=replace(whole.design, isolation=composed.isolation),
        seed=whole.seed,
        question=whole.ablation.question,
        published=published_rows.of_cell(whole.ablation.published, whole),
        scale=whole.scale.value if whole.scales else None,
    )


def _dropped(overrides: Sequence[str]) -> list[str]:
    """Name the arms that the overrides take away: ``~ablation.arms.NAME``."""
    keys = (o[1:].split("=", 1)[0] for o in overrides if o.startswith("~"))
    return [key.removeprefix("ablation.arms.") for key in keys]


def _with_arm(cell: Sequence[str], overrides: Mapping[str, Any]) -> list[str]:
    kept = [o for o in cell if o.split("=", 1)[0] not in overrides]
    return [*kept, *(f"{key}={hydra_quote(value)}" for key, value in overrides.items())]


def _check_arm(name: str, arm: Experiment, overrides: Mapping[str, Any]) -> None:
    """Check what an arm may change, and what can be known before a worker starts."""
    for key in overrides:
        require(
            key.lstrip("+~").split(".")[0].split("@")[0] in ("engine", "model", "workload"),
            f"arm {name}: {key} is the cell's and the same for every arm; "
            "an arm may change engine, model and workload",
        )
    for key, path in own_classes(arm.engine).items():
        module = path.partition(":")[0]
        require(
            _importable(module),
            f"arm {name}: {key}={path}: no module {module!r} on the Python path",
        )
    if arm.model.shape is None:
        from labkit.models import resolve

        resolve(arm.model)
    from labkit import workload
    from labkit.engine import budget, parallel
    from labkit.workload import device_check

    try:
        device_check.check(arm)
        workload.check(arm)
        budget.check(arm)
        parallel.check(arm)
    except ConfigError as error:
        raise ConfigError(f"arm {name}: {error}") from None


def _importable(module: str) -> bool:
    """Tell whether a module can be found; parents are imported, the module is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
