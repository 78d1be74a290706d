"""Arms: compose every arm of every cell with Hydra, and check them all before any runs.

A cell is given by its overrides. Each arm is the same cell with the arm's own overrides
behind, so an arm wins over the command line. Hydra is needed here and nowhere below: an
arm leaves as an ``Experiment`` of plain dataclasses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.config import (
    CONTROL,
    ConfigError,
    Experiment,
    Isolation,
    from_plain,
    own_classes,
    require,
)
from labkit.experiment import sharing
from labkit.experiment.mistakes import one_line

UNNAMED = ("out", "plan", "redo", "design.blocks")


@dataclass(frozen=True)
class ComposedArm:
    """An arm: its role (baseline, arm or control), its overrides and what they make."""

    name: str
    role: str
    overrides: dict[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class ComposedCell:
    """A cell: the name of its folder, its config and its arms, the baseline first.

    ``isolation``: where its runs happen, decided. ``apart``: why not in one process.
    """

    name: str
    experiment: Experiment
    arms: tuple[ComposedArm, ...]
    isolation: Isolation
    apart: str | None = None


def cell_name(task_overrides: Iterable[str]) -> str:
    """Name a cell's folder by its overrides (design.md section 4)."""
    named = sorted(o for o in task_overrides if o.lstrip("+~").split("=", 1)[0] not in UNNAMED)
    name = re.sub(r"[^A-Za-z0-9=,._+~-]", "_", ",".join(named)) or "default"
    if len(name) > 120:
        digest = hashlib.sha256(",".join(named).encode()).hexdigest()[:12]
        name = f"{name[:107]}-{digest}"
    return name


def expand(overrides: Sequence[str], params: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Expand comma overrides into one list of overrides per cell, in the sweeper's order.

    ``params``: ``hydra.sweeper.params`` of the composed config.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    lists: list[list[str]] = []
    swept = [f"{key}={value}" for key, value in (params or {}).items()]
    for override in parser.parse_overrides([*swept, *overrides]):
        key = override.get_key_element()
        if override.is_sweep_override():
            require(override.is_discrete_sweep(), f"{override.input_line}: not a list of values")
            lists.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            lists.append([f"{key}={override.get_value_element_as_str()}"])
    return [list(cell) for cell in itertools.product(*lists)]


def quote(value: Any) -> str:
    """Write ``value`` in Hydra's override grammar, so that it is read back as it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quote(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(quote(item) for item in value) + "]"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in ("null", "true", "false"):
        return text
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"


def compose_cell(hydra_overrides: Sequence[str], task_overrides: Sequence[str]) -> ComposedCell:
    """Compose and validate one cell with all its arms. Needs Hydra to be initialized.

    Raises
    ------
    ConfigError
        In one line: the arm, the key and what is allowed.
    """
    cell = [*hydra_overrides, *task_overrides]
    whole = _compose(cell, "")
    ablation = whole.ablation
    baseline = ablation.baseline_arm
    names = [baseline, *(name for name in ablation.arms if name != baseline)]
    arms = []
    for name in names:
        overrides = dict(ablation.arms[name])
        experiment = _compose(_with_arm(cell, overrides), f"arm {name}: ")
        _check_arm(name, experiment, overrides)
        role = "baseline" if name == baseline else "arm"
        arms.append(ComposedArm(name, role, overrides, experiment))
    if whole.design.control:
        first = arms[0]
        arms.append(ComposedArm(CONTROL, "control", first.overrides, first.experiment))
    isolation, apart = sharing.settle(whole.design, [arm.experiment for arm in arms])
    return ComposedCell(cell_name(task_overrides), whole, tuple(arms), isolation, apart)


def _with_arm(cell: Sequence[str], overrides: Mapping[str, Any]) -> list[str]:
    kept = [o for o in cell if o.split("=", 1)[0] not in overrides]
    return [*kept, *(f"{key}={quote(value)}" for key, value in overrides.items())]


def _compose(overrides: list[str], where: str) -> Experiment:
    from hydra import compose
    from omegaconf import OmegaConf

    try:
        config = compose("config", overrides=overrides)
        plain = OmegaConf.to_container(
            config, resolve=True, throw_on_missing=True, enum_to_str=True
        )
        return from_plain(Experiment, plain)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    except Exception as error:
        raise ConfigError(f"{where}{one_line(error, overrides)}") from None


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
    from labkit.engine import budget
    from labkit.workload import devices

    try:
        devices.check(arm)
        budget.check(arm)
    except ConfigError as error:
        raise ConfigError(f"arm {name}: {error}") from None


def _importable(module: str) -> bool:
    """Tell whether a module can be found; parents are imported, the module is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
