"""The cell composer: compose and check a cell with all its arms, before any run starts.

A cell is defined by its overrides. An arm is the same cell with the arm's own overrides appended,
so an arm wins over the command line. The arms returned here hold plain dataclasses and JSON values,
so that workers need no Hydra.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from labkit.config import (
    CONTROL,
    Ablation,
    ConfigError,
    Design,
    Experiment,
    Isolation,
    is_class_path,
    require,
    to_plain,
    user_classes,
)
from labkit.config.arm_sweep import key_parts
from labkit.config.env_interpolation import EXPRESSION
from labkit.config.former_options import with_former_values
from labkit.config.option_index import did_you_mean, in_units_of_option, override_key
from labkit.experiment.cell import ALLOCATION, ReadyCell, fixed_numbers, with_units
from labkit.experiment.compose import claimed_counter_check, published_rows
from labkit.experiment.compose.cell_name import cell_name, recorded_overrides
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks, with_reachable_looks
from labkit.experiment.compose.resumed_legacy_cell import as_begun, rounds_as_begun
from labkit.experiment.compose.sweep_as_arms import with_swept_arms
from labkit.experiment.compose.user_class_import_check import check_workload_class
from labkit.experiment.hydra.hydra_composer import Composer, config_folders, hydra_quote
from labkit.experiment.launch import python_environment
from labkit.experiment.launch.exported_revision import RevisionError
from labkit.experiment.launch.python_environment import Imports, PythonEnvironment
from labkit.experiment.worker.turn_protocol import VERSION
from labkit.machine.facts import memory_capacity
from labkit.records import PROCESSES_SUFFIX, Arm

ARM_CONFIG_KEYS = ("engine", "model", "workload", "seed")  # the config in an arm's file
ENGINE_KEYS = ("engine", "model")  # of these keys, those left out if the workload has no engine
ENVIRONMENT = "environment"  # the only key of an arm that is not an option
LIVE_MEMORY_SHARE = 0.75  # of RAM, for processes that are alive at the same time

Checks = tuple[Callable[[Experiment], object], ...]


@dataclass(frozen=True)
class ComposedCell:
    """A composed and checked cell. Fields without a comment are as in :class:`ReadyCell`."""

    name: str  # of the cell's folder
    experiment: Experiment  # without any arm's overrides
    arms: tuple[Arm, ...]
    experiments: Mapping[str, Experiment]  # by arm
    isolation: Isolation  # never ``auto``
    # Why the arms do not share a process; None if they do. With isolation ``process`` it also says
    # why the arms' processes do not take turns.
    separate_processes_reason: str | None = None
    overrides: tuple[str, ...] = ()
    blocks_given: bool = False  # whether an override sets ``design.blocks``
    ends_early: bool = True
    config_dirs: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.experiments[self.arms[0].name].primary_metrics

    @property
    def tested_arms(self) -> int:
        """The number of arms that are tested together; the settings of a sweep are ranked."""
        arms = sum(arm.role == "arm" for arm in self.arms)
        return 1 if self.experiment.ablation.sweep else max(1, arms)


def compose_cell(
    hydra_overrides: Sequence[str],
    task_overrides: Sequence[str],
    composer: Composer | None = None,
) -> ComposedCell:
    """Compose and check one cell with all its arms. Hydra must be initialised.

    ``composer`` caches parsed files for all cells of a command. Raises ``ConfigError`` if an arm or
    a claim is invalid.
    """
    composer = composer or Composer()
    cell, experiment = _cell_config([*hydra_overrides, *task_overrides], composer)
    require(
        bool(experiment.ablation.sweep) or not experiment.design.eliminate,
        "design.eliminate=true: only settings of a sweep are dropped; sweep an option such as "
        "engine.kv.block_size=8,16,32, or choose another design",
    )

    def compose_arm(arm: str, overrides: Mapping[str, Any]) -> Experiment:
        return composer.compose(_with_arm(cell, overrides), f"arm {arm}: ")

    removed = (override_key(o) for o in cell if o.startswith("~"))  # ~ablation.arms.NAME
    dropped = [key.removeprefix("ablation.arms.") for key in removed]
    return replace(
        checked_cell(experiment, compose_arm, cell_name(task_overrides), dropped),
        overrides=tuple(recorded_overrides(task_overrides)),
        blocks_given="design.blocks" in map(override_key, task_overrides),
        config_dirs=config_folders(hydra_overrides),
    )


def _cell_config(overrides: Sequence[str], composer: Composer) -> tuple[list[str], Experiment]:
    """Return a cell's overrides, with those of its scale, and its config, with a sweep's arms."""
    cell = with_scale_overrides(overrides, composer)
    experiment = _base_of(cell, composer)
    if experiment.ablation.sweep:
        experiment = with_swept_arms(experiment, composer.choices(cell))
    return cell, experiment


def checked_cell(
    experiment: Experiment,
    compose_arm: Callable[[str, Mapping[str, Any]], Experiment],
    name: str,
    dropped: Sequence[str] = (),
) -> ComposedCell:
    """Compose and check the arms of the cell ``name``; raises as :func:`compose_cell`.

    ``compose_arm`` returns an arm's config, given its name and its overrides. ``dropped``: arms of
    the ablation that the cell leaves out.
    """
    ablation = experiment.ablation
    baseline = ablation.baseline_arm
    names = [baseline, *(arm for arm in ablation.arms if arm != baseline)]
    experiments: dict[str, Experiment] = {}
    imports: dict[str, Imports] = {}
    arms: list[Arm] = []
    for arm_name in names:
        own = {key: v for key, v in ablation.arms[arm_name].items() if key != ENVIRONMENT}
        experiments[arm_name] = compose_arm(arm_name, own)
        arm = _arm(arm_name, ablation, experiments[arm_name])
        if ENVIRONMENT in ablation.arms[arm_name]:
            arm, imports[arm_name] = _with_environment(
                arm, experiments[arm_name], ablation.arms[arm_name][ENVIRONMENT]
            )
        else:
            _check_classes(arm_name, experiments[arm_name], _is_importable)
        _check_arm(arm_name, experiments[arm_name], own)
        _check_distinct(arm, arms)
        arms.append(arm)
    engines = {arm: of_arm.engine for arm, of_arm in experiments.items()}
    claimed_counter_check.check_names(ablation.claims.engaged, engines, dropped)
    _check_out_of_memory(ablation, engines.keys() | set(dropped))
    claimed_counter_check.check_weights(ablation.claims.engaged, experiments)
    claimed_counter_check.check_launches(ablation.claims.engaged, experiments)
    if experiment.design.control:
        arms.append(replace(arms[0], name=CONTROL, role="control"))
        experiments[CONTROL] = experiments[baseline]
    isolation, reason = resolve_isolation(experiment.design, list(experiments.values()), imports)
    return ComposedCell(name, experiment, tuple(arms), experiments, isolation, reason)


def with_scale_overrides(overrides: Sequence[str], composer: Composer) -> list[str]:
    """Return a cell's overrides, preceded by those of the experiment's scale.

    The cell's own overrides take precedence. Raises ``ConfigError`` if the overrides are invalid,
    or the experiment lacks the selected scale.
    """
    experiment = _base_of(overrides, composer)
    given = {override.split("=", 1)[0] for override in overrides}
    scaled = experiment.scales.get(experiment.scale.value, {})
    # ``++``: a scale may add an arm, whose keys do not exist yet.
    add = {key: "++" if key.startswith("ablation.arms.") else "" for key in scaled}
    scale_overrides = [
        in_units_of_option(f"{add[key]}{key}={hydra_quote(value)}")
        for key, value in scaled.items()
        if key not in given
    ]
    return [*scale_overrides, *overrides]


def _base_of(overrides: Sequence[str], composer: Composer) -> Experiment:
    """Return a cell's config without any arm's overrides.

    If its options contradict each other and those of its baseline do not (a server's options, and
    ``engine=openai`` in every arm), the config of the baseline is returned: only arms run.
    """
    try:
        return composer.compose(overrides)
    except ConfigError as error:
        arm = composer.baseline_overrides(overrides)
        if not arm:
            raise
        try:
            return composer.compose(_with_arm(overrides, arm))
        except ConfigError:
            raise error from None


def write_config(path: Path, hydra_overrides: Sequence[str], task_overrides: Sequence[str]) -> None:
    """Replace the config that Hydra wrote for a job by the config that the job runs.

    Hydra composes a job without the overrides of the experiment's scale and without the arms of a
    sweep, so its file would lack both. An arm's config is this file with the arm's overrides.
    Hydra must be initialised.
    """
    from omegaconf import OmegaConf

    _, experiment = _cell_config([*hydra_overrides, *task_overrides], Composer())
    OmegaConf.save(OmegaConf.create(to_plain(experiment)), path)


def _check_out_of_memory(ablation: Ablation, arms: Collection[str]) -> None:
    for name in ablation.claims.out_of_memory:
        where, known = f"ablation.claims.out_of_memory={name}", ", ".join(ablation.arms)
        text = f"{where}: no such arm{did_you_mean(name, arms)}; the arms are {known}"
        require(name in arms, text)
        text = f"{where}: it is the baseline, with which the others are compared"
        require(name != ablation.baseline_arm, text)


def _arm(name: str, ablation: Ablation, experiment: Experiment) -> Arm:
    plain = to_plain(experiment)
    absent = () if experiment.workload.has_engine else ENGINE_KEYS
    return Arm(
        name=name,
        role="baseline" if name == ablation.baseline_arm else "arm",
        overrides=to_plain(ablation.arms[name]),
        config={key: plain[key] for key in ARM_CONFIG_KEYS if key not in absent},
        identity=ablation.claims.identity.value,
        engaged=tuple(ablation.claims.engaged.get(name, [])),
        all_served=ablation.claims.all_served,
        out_of_memory=name in ablation.claims.out_of_memory,
        quality=ablation.claims.quality.limits(),
    )


def _with_environment(arm: Arm, experiment: Experiment, plain: Any) -> tuple[Arm, Imports]:
    """Build an arm's environment, and import labkit in it as a test.

    Returns the arm with this environment, and the results of the import. Options that the
    environment's revision of labkit lacks are left out of the arm's config, which the revision
    reads as a test.
    """
    engine, kind = experiment.engine, experiment.workload.kind
    paths = [*user_classes(engine).values(), *([kind] if is_class_path(kind) else [])]
    modules = tuple(sorted({path.partition(":")[0] for path in paths}))
    program = engine.server.python_program if engine.name == "openai" else None
    try:
        environment = PythonEnvironment.resolve(plain)
        imports = python_environment.imports_of(environment, modules, program)
        config = arm.config
        if environment.replaces_labkit:
            theirs, ours = imports.defaults, python_environment.default_options()
            config = python_environment.known_options(with_former_values(config), theirs, ours)
            # This option is as old as expressions in an arm's file.
            knows = "api_key" in imports.defaults.get("engine", {}).get("server", {})
            named = EXPRESSION.search(json.dumps(config))
            if named is not None and not knows:
                raise RevisionError(
                    f"{named.group()}: the arm's revision of labkit would take this for the value"
                )
            refusal = python_environment.refusal_of(environment, json.dumps(fixed_numbers(config)))
            if refusal is not None:
                raise RevisionError(f"the arm's revision of labkit refuses {refusal}")
    except ConfigError as error:
        raise type(error)(f"arm {arm.name}: {error}") from None
    _check_classes(arm.name, experiment, lambda module: module not in imports.missing)
    return replace(arm, config=config, environment=environment.identity()), imports


def resolve_isolation(
    design: Design, experiments: Sequence[Experiment], imports: Mapping[str, Imports] | None = None
) -> tuple[Isolation, str | None]:
    """Return the isolation of the arms' runs, and the reason if they do not share a process.

    ``imports``: what the arms with environments of their own import, by the arm's name.

    Raises ``ConfigError`` if the arms do not allow the isolation that the design sets, or the
    workload compares arms while they run and these would run one after another.
    """
    from labkit import workload

    requested, imports = design.isolation, imports or {}
    if requested in (Isolation.process, Isolation.live):
        reason: str | None = f"design.isolation={requested.value} requires it"
    elif imports:
        reason = f"arm {next(iter(imports))} has an environment of its own"
    else:
        reason = workload.apart(experiments)
    if reason is None:
        if design.confirm:
            workload.check_apart(experiments, f"design.confirm={design.confirm} requires it")
        return Isolation.in_process, None
    if requested is Isolation.process:
        workload.check_apart(experiments, reason)
        return Isolation.process, reason
    if requested is Isolation.in_process:
        raise _refusal(requested, reason)
    protocol = _other_protocol(imports)
    obstacle = protocol or workload.not_live(experiments) or _too_large(experiments)
    if obstacle is None:
        if design.confirm:
            workload.check_apart(experiments, f"design.confirm={design.confirm} requires it")
        return Isolation.live, reason
    whole_reason = reason if reason == obstacle else f"{reason}; not live: {obstacle}"
    try:
        if requested is Isolation.live:
            raise _refusal(requested, obstacle)
        workload.check_apart(experiments, whole_reason)
    except ConfigError as error:
        if protocol is None:
            raise
        raise RevisionError(str(error)) from None
    return Isolation.process, whole_reason


def _refusal(requested: Isolation, reason: str) -> ConfigError:
    return ConfigError(
        f"design.isolation={requested.value}: {reason}; set design.isolation to process or auto"
    )


def _other_protocol(imports: Mapping[str, Imports]) -> str | None:
    """Return the reason that an environment's worker cannot take turns with others, or None."""
    for name, imported in imports.items():
        if imported.protocol != VERSION:
            theirs = imported.protocol or "none"
            return (
                f"the worker of arm {name} uses version {theirs} of the turn protocol, and this "
                f"labkit uses version {VERSION}"
            )
    return None


def _too_large(experiments: Sequence[Experiment]) -> str | None:
    """Return the reason that these arms do not fit into memory at the same time, or None."""
    from labkit import workload

    needed = sum(workload.estimate(experiment).bytes for experiment in experiments)
    total = memory_capacity.this_machine().total
    if needed <= LIVE_MEMORY_SHARE * total:
        return None
    return (
        f"{len(experiments)} arms need about {needed / 2**30:.1f} GiB at the same time, more than "
        f"{LIVE_MEMORY_SHARE:.0%} of this machine's {total / 2**30:.1f} GiB"
    )


def to_cells(composed: ComposedCell, folder: Path) -> list[ReadyCell]:
    """Return the cells to run: the cell itself and, with ``design.confirm``, one that confirms it.

    Interleaved runs show neither how arms affect each other in a shared process nor how results
    vary between processes. The confirming cell repeats the comparison with ``design.confirm``
    blocks in separate processes. It exists only if the first cell is interleaved. Its runs have as
    many requests or windows as those of the first cell, once that has found their number.
    """
    cell, confirm = to_cell(composed, folder), composed.experiment.design.confirm
    if not confirm or not cell.design.isolation.takes_turns:
        return [cell]
    folder = folder.with_name(f"{folder.name}{PROCESSES_SUFFIX}")
    design = composed.experiment.design
    design = replace(
        design, isolation=Isolation.process, blocks=confirm, looks=[], eliminate=False, confirm=0
    )
    design = as_begun(design, Isolation.process, folder, blocks_given=False)
    confirming = replace(
        cell,
        dir=folder,
        name=cell.name + PROCESSES_SUFFIX,
        design=with_reachable_looks(design, cell.tested_arms, folder, blocks_given=False),
        arms=tuple(with_units(cell.dir, arm) for arm in cell.arms),
        blocks_from_time=False,
        units_from_time=False,
    )
    return [cell, confirming]


def to_cell(composed: ComposedCell, folder: Path) -> ReadyCell:
    """Return the cell that runs a composed cell in ``folder``."""
    experiment, given, arms = composed.experiment, composed.blocks_given, composed.tested_arms
    design = as_begun(experiment.design, composed.isolation, folder, given)
    from_time = design.blocks == 0
    if from_time:
        design = replace(design, blocks=fewest_blocks(design, arms))
    return ReadyCell(
        dir=folder,
        name=composed.name,
        arms=rounds_as_begun(composed.arms, folder),
        design=with_reachable_looks(design, arms, folder, given and not from_time),
        blocks_from_time=from_time,
        ends_early=composed.ends_early,
        # Blocks that are added serve what a pilot found for the first ones.
        units_from_time=from_time or not given or (folder / ALLOCATION).exists(),
        seed=experiment.seed,
        question=to_plain(experiment.ablation.question) or _default_question(experiment.ablation),
        sweep=experiment.ablation.sweep,
        overrides=composed.overrides,
        config_dirs=composed.config_dirs,
        published=published_rows.rows_of_cell(
            experiment.ablation.published,
            experiment,
            baseline_given="ablation.baseline" in map(override_key, composed.overrides),
        ),
        scale=experiment.scale.value if experiment.scales else None,
        metrics=composed.metrics,
    )


def _default_question(ablation: Ablation) -> str:
    others = [name for name in ablation.arms if name != ablation.baseline_arm]
    if not others:
        return "How fast is it, and how noisy is this machine?"
    verb = "does" if len(others) == 1 else "do"
    return f"How {verb} {' and '.join(others)} compare with {ablation.baseline_arm}?"


def _with_arm(cell: Sequence[str], overrides: Mapping[str, Any]) -> list[str]:
    others = [o for o in cell if o.split("=", 1)[0] not in overrides]
    own = (in_units_of_option(f"{key}={hydra_quote(value)}") for key, value in overrides.items())
    return [*others, *own]


def _check_distinct(arm: Arm, earlier: Sequence[Arm]) -> None:
    for other in earlier:
        require(
            arm.config != other.config or bool(arm.environment or other.environment),
            f"arm {arm.name}: every option has the same value as in arm {other.name}; change one, "
            f"or drop the arm with ~ablation.arms.{arm.name} (the control already repeats the "
            "baseline)",
        )


def _check_arm(name: str, arm: Experiment, overrides: Mapping[str, Any]) -> None:
    """Check everything about an arm that can be checked without a worker process."""
    for key in overrides:
        require(
            key_parts(key.lstrip("+~").split("@")[0])[0] in ("engine", "model", "workload"),
            f"arm {name}: {key} must be the same for every arm; "
            "an arm may change options of engine, model and workload, and have an environment",
        )
    if error := next(obstacles(arm), None):
        raise ConfigError(f"arm {name}: {error}")


def obstacles(arm: Experiment) -> Iterator[ConfigError]:
    """Yield a reason for each part of an arm that this machine cannot run.

    The other parts are not checked if the packages or the model that they read are not there.
    """
    from labkit import workload
    from labkit.engine import memory_budget, parallel
    from labkit.workload import device_availability

    read: Checks = (device_availability.check_packages, _check_model)
    own: Checks = (device_availability.check, check_workload_class, workload.check)
    for check in (*read, *own, memory_budget.plan_for_arm, parallel.check):
        try:
            check(arm)
        except ConfigError as error:
            yield error
            if check in read:
                return


def _check_model(arm: Experiment) -> None:
    from labkit.models import resolve

    if arm.model.shape is None:  # others are built when they are needed
        resolve(arm.model)


def _check_classes(name: str, arm: Experiment, is_importable: Callable[[str], bool]) -> None:
    for key, path in user_classes(arm.engine).items():
        module = path.partition(":")[0]
        require(
            is_importable(module),
            f"arm {name}: {key}={path}: no module {module!r} on the Python path; "
            "start the command in its folder, or set PYTHONPATH",
        )


def _is_importable(module: str) -> bool:
    """Return whether a module exists, without importing its packages, which may fail."""
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or not parts:
        return spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    searched = list(folders)
    for part in parts[:-1]:
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        searched += folders
    files = [f"{parts[-1]}{suffix}" for suffix in all_suffixes()]
    found = (
        (folder / parts[-1]).is_dir() or any((folder / file).is_file() for file in files)
        for folder in folders
    )
    return any(found) or any(map(_searches_elsewhere, searched))


def _searches_elsewhere(package: Path) -> bool:
    """Return whether a package's modules may lie elsewhere than in its folder.

    It is in a zip file, say, or its ``__init__.py`` sets ``__path__``.
    """
    init = package / "__init__.py"
    return not package.is_dir() or (init.is_file() and b"__path__" in init.read_bytes())
