"""Composition of a study: from a parsed command to its cells and the launcher of its jobs.

Every arm of every cell is composed and checked before Hydra writes a folder, so a typo in the last
cell is reported before the first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.cli.hydra_arguments import CONF, Command
from labkit.config import ConfigError, Experiment, require
from labkit.config.option_index import override_key

if TYPE_CHECKING:
    from labkit.experiment.compose.cell_composer import ComposedCell
    from labkit.experiment.hydra.job_launchers import JobLauncher


def register() -> None:
    """Register the schema and the resolvers that ``conf/`` uses; repeated calls are harmless."""
    import warnings

    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from labkit.experiment.compose.cell_name import cell_name
    from labkit.experiment.hydra import yaml_validation
    from labkit.experiment.hydra.hydra_composer import unresolved

    yaml_validation.register()
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        store.store(name="schema", node=Experiment)
    # Hydra warns that files of conf/ are validated against the schema of a plugin's launcher.
    # That is intended.
    warnings.filterwarnings("ignore", r"\n'hydra/launcher/\w+' is validated against ConfigStore")
    OmegaConf.register_new_resolver("cell", lambda task: cell_name(unresolved(task)), replace=True)


def initialized() -> AbstractContextManager[Any]:
    """Return a context manager in which Hydra composes from ``conf/``."""
    from hydra import initialize_config_dir

    return initialize_config_dir(config_dir=str(CONF), version_base="1.3")


def compose_cells(command: Command) -> list[ComposedCell]:
    """Compose and check every arm of every cell.

    A search (a sweeper such as Optuna) chooses its trials while it runs. For a search, the result
    is therefore a single cell, without the searched options.

    Nothing is written, except that a model given as a GGUF file may be converted into the cache.
    Raises ``ConfigError`` for the first cell or arm that is invalid.
    """
    from labkit.experiment.compose.cell_composer import compose_cell
    from labkit.experiment.hydra import hydra_composer
    from labkit.experiment.hydra.hydra_error_text import config_errors_in_one_line
    from labkit.experiment.hydra.job_launchers import is_search

    hydra, task = hydra_and_task(command)
    with initialized():
        with config_errors_in_one_line(command.overrides):
            if command.multirun:
                config = _hydra_config([*hydra, *hydra_composer.first_cell(task)])
                if is_search(config):
                    cells = [hydra_composer.fixed_overrides(task)]
                else:
                    params = _sweeper_params(config.sweeper.params or {})
                    cells = hydra_composer.expand_sweep(task, params)
                    _check_swept_experiments(cells, hydra)
            else:
                refuse_sweeps(task, "several values need -m; add it at the end of the command")
                # Hydra names the folder after the overrides as the user typed them.
                cells = [task]
        composer = hydra_composer.Composer()
        composed = [compose_cell(hydra, cell, composer) for cell in cells]
    _check_names(composed)
    return composed


def refuse_sweeps(overrides: Sequence[str], remedy: str) -> None:
    """Raise ``ConfigError`` if an override has several values; ``remedy`` says what to do then."""
    from labkit.experiment.hydra.hydra_composer import expand_sweep
    from labkit.experiment.hydra.hydra_error_text import config_errors_in_one_line

    with config_errors_in_one_line(overrides):
        for override in overrides:
            require(len(expand_sweep([override])) == 1, f"{override}: {remedy}")


def only_plans(overrides: Sequence[str]) -> bool:
    """Return whether overrides ask for plans alone, in any of the words for a boolean."""
    from labkit.experiment.hydra.hydra_composer import Composer

    words = [word for word in overrides if override_key(word) == "plan"]
    if not words:
        return False
    with initialized():
        return Composer().compose(words).plan


def hydra_and_task(command: Command) -> tuple[list[str], list[str]]:
    """Return Hydra's own overrides of a command, and the others, which name its cells."""
    hydra = [o for o in command.overrides if o.lstrip("+~").startswith("hydra")]
    return hydra, [o for o in command.overrides if o not in hydra]


def _hydra_config(overrides: Sequence[str]) -> Any:
    """Return Hydra's own part of the config that overrides compose."""
    from hydra import compose

    return compose("config", overrides=list(overrides), return_hydra_config=True).hydra


def _check_names(cells: Sequence[ComposedCell]) -> None:
    """Refuse cells with one name, or that differ only in what may change in a continued study."""
    from labkit.experiment.compose.cell_name import CHANGEABLE_KEYS, fixed_overrides

    names = [cell.name for cell in cells]
    name = max(names, key=names.count, default="")
    fixed = [tuple(fixed_overrides(cell.overrides)) for cell in cells]
    alike = {own for cell, own in zip(cells, fixed, strict=True) if cell.name == name}
    require(
        names.count(name) < 2 or len(alike) > 1,
        f"{name}: the command has this cell twice; remove a repeated value",
    )
    require(
        names.count(name) < 2,
        f"{name}: two cells would have this folder, because their values differ only in characters "
        "that become _ in its name; rename a file or a value",
    )
    require(
        len(set(fixed)) == len(cells),
        f"{', '.join(CHANGEABLE_KEYS)}: cells must differ in another option, because these may "
        "change while a study is continued; set one value",
    )


def _sweeper_params(params: Any) -> dict[str, Any]:
    """Return ``hydra.sweeper.params``, whose values become names of folders."""
    for key in params:
        require(
            "oc.env" not in str(params._get_node(key)),
            f"hydra.sweeper.params: {key}: the value of an environment variable would become the "
            "name of a folder; set it in an arm or on the command line",
        )
    return dict(params)


def _check_swept_experiments(cells: Sequence[Sequence[str]], hydra: Sequence[str]) -> None:
    """Refuse a sweep of an experiment's own beside other experiments: Hydra would ignore it."""
    names = dict.fromkeys(o for cell in cells for o in cell if o.startswith("experiment="))
    for name in names if len(names) > 1 else ():
        if _hydra_config([*hydra, name]).sweeper.params:
            raise ConfigError(
                f"{name} has a sweep of its own (hydra.sweeper.params), so it must be the only "
                "experiment of a command"
            )


def with_sweep_as_arms(command: Command) -> Command:
    """Return the command with its swept options turned into arms of one cell, where possible.

    A command with ``hydra/launcher=...`` or ``hydra/sweeper=...`` is returned unchanged, because
    these plugins distribute or choose cells: every combination of values must stay a cell. So is
    one whose experiment sets them, or sweeps one of the command's options itself.
    """
    from labkit.experiment.compose.sweep_as_arms import sweep_as_arms
    from labkit.experiment.hydra.hydra_composer import Composer
    from labkit.experiment.hydra.hydra_error_text import config_errors_in_one_line

    plugins = ("hydra/launcher=", "hydra/sweeper=")
    launched = any(o.startswith(plugins) for o in command.overrides)
    if not command.multirun or launched:
        return command
    hydra, task = hydra_and_task(command)
    with initialized(), config_errors_in_one_line(command.overrides):
        if _experiment_makes_cells(hydra, task):
            return command
        swept = sweep_as_arms(task, Composer(), hydra)
    return replace(command, overrides=(*hydra, *swept))


def _experiment_makes_cells(hydra: Sequence[str], task: Sequence[str]) -> bool:
    """Return whether the command's experiment chooses, distributes or sweeps its cells."""
    from labkit.experiment.hydra.hydra_composer import first_cell
    from labkit.experiment.hydra.job_launchers import JobLauncher

    keys = {override.split("=", 1)[0] for override in task}
    if "experiment" not in keys:
        return False
    chosen = _hydra_config([*hydra, *first_cell(task)])
    launcher, swept = JobLauncher.of(chosen), chosen.sweeper.params or {}
    return launcher.is_search or not launcher.is_local or not keys.isdisjoint(swept)


def launcher_of(command: Command) -> JobLauncher:
    """Return the launcher that the command selects, after checking that it can work here.

    A search needs a launcher that runs its cells in this process. Raises ``ConfigError`` if the
    launcher cannot work here.
    """
    from labkit.experiment.hydra.hydra_composer import first_cell
    from labkit.experiment.hydra.job_launchers import JobLauncher

    with initialized():
        launcher = JobLauncher.of(_hydra_config(first_cell(command.overrides)))
    launcher.check(command.multirun)
    return launcher
