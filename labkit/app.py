"""The application ``python -m labkit``: one command is one study, one Hydra job is one cell.

Every arm of every cell is composed and checked before Hydra writes a folder, so a typo in the last
cell is reported before the first run. Exit codes: 0 if all cells ran and every gate held, 1 if a
gate or a run failed, 2 for an error in the command or the configuration, 130 if interrupted.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from labkit import __version__
from labkit.cli.command_line import CONF as CONF
from labkit.cli.command_line import PRINT_FLAGS
from labkit.cli.command_line import Command as Command
from labkit.cli.command_line import parse as parse
from labkit.config import ConfigError, Experiment, require
from labkit.machine.exception_text import one_line
from labkit.records import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from labkit.cli.study_runner import Study
    from labkit.experiment.compose.cell_composer import ComposedCell
    from labkit.experiment.hydra.job_launcher import JobLauncher

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)


def register() -> None:
    """Register the schema and the OmegaConf resolvers that ``conf/`` uses.

    Repeated calls are harmless.
    """
    import warnings

    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from labkit.experiment.compose.cell_name import cell_name
    from labkit.experiment.hydra import yaml_source
    from labkit.experiment.hydra.hydra_composer import unresolved

    yaml_source.register()
    ConfigStore.instance().store(name="schema", node=Experiment)
    # Hydra warns that files of conf/ are validated against the schema of a plugin's launcher.
    # That is intended.
    warnings.filterwarnings("ignore", r"\n'hydra/launcher/\w+' is validated against ConfigStore")
    OmegaConf.register_new_resolver("cell", lambda task: cell_name(unresolved(task)), replace=True)
    OmegaConf.register_new_resolver("options", _help, replace=True)


def _help(*, _root_: Any) -> str:
    """Return the list of options, with their values in this config, for the ``--help`` template."""
    from omegaconf import OmegaConf

    from labkit.config import option_index

    def value(key: str) -> Any:
        selected = OmegaConf.select(_root_, key)
        return OmegaConf.to_container(selected) if OmegaConf.is_config(selected) else selected

    return option_index.help_lines(value).replace("$", "$$")


def initialized() -> AbstractContextManager[Any]:
    """Return a context manager in which Hydra composes from ``conf/``."""
    from hydra import initialize_config_dir

    return initialize_config_dir(config_dir=str(CONF), version_base="1.3")


def compose_cells(command: Command) -> list[ComposedCell]:
    """Compose and check every arm of every cell.

    A search (a sweeper such as Optuna) chooses its trials while it runs. For a search, the result
    is therefore a single cell, without the searched options.

    Nothing is written, except that a model given as a GGUF file may be converted into the cache.

    Raises
    ------
    ConfigError
        A cell or an arm is invalid. The message is one line about the first error.
    """
    from hydra import compose

    from labkit.experiment.compose.cell_composer import compose_cell
    from labkit.experiment.hydra.hydra_composer import (
        Composer,
        expand_sweep,
        first_cell,
        fixed_overrides,
    )
    from labkit.experiment.hydra.hydra_error_text import explain_config_error
    from labkit.experiment.hydra.job_launcher import is_search

    hydra = [o for o in command.overrides if o.lstrip("+~").startswith("hydra")]
    task = [o for o in command.overrides if o not in hydra]
    with initialized():
        try:
            if command.multirun:
                first = [*hydra, *first_cell(task)]
                config = compose("config", overrides=first, return_hydra_config=True)
                if is_search(config.hydra):
                    cells = [fixed_overrides(task)]
                else:
                    cells = expand_sweep(task, _sweeper_params(config.hydra.sweeper.params or {}))
                    _check_swept_experiments(cells, hydra)
            else:
                swept = next((o for o in task if len(expand_sweep([o])) > 1), None)
                if swept is not None:
                    raise ConfigError(
                        f"{swept}: several values need -m; add it at the end of the command"
                    )
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(explain_config_error(error, command.overrides)) from None
        # Without -m, Hydra names the folder after the overrides as the user typed them.
        if not command.multirun:
            cells = [task]
        composer = Composer()
        composed = [compose_cell(hydra, cell, composer) for cell in cells]
    names = [cell.name for cell in composed]
    if len(set(names)) < len(names):
        raise ConfigError(_same_name(max(names, key=names.count), composed))
    return composed


def _same_name(name: str, cells: Sequence[ComposedCell]) -> str:
    """Return why two cells have the same name."""
    overrides = {cell.overrides for cell in cells if cell.name == name}
    if len(overrides) == 1:
        return f"{name}: the command has this cell twice; remove a repeated value"
    return (
        f"{name}: two cells would have this folder, because their values differ only in characters "
        "that become _ in its name; rename a file or a value"
    )


def _sweeper_params(params: Any) -> dict[str, Any]:
    """Return ``hydra.sweeper.params``, whose values become names of folders."""
    for key in params:
        secret = "oc.env" in str(params._get_node(key))
        require(
            not secret,
            f"hydra.sweeper.params: {key}: the value of an environment variable would become the "
            "name of a folder; set it in an arm or on the command line",
        )
    return dict(params)


def _check_swept_experiments(cells: Sequence[Sequence[str]], hydra: Sequence[str]) -> None:
    """Refuse several experiments in one command if one of them has a sweep of its own.

    Hydra would ignore such a sweep, because it reads ``hydra.sweeper.params`` before it composes
    the jobs.
    """
    from hydra import compose

    names = dict.fromkeys(o for cell in cells for o in cell if o.startswith("experiment="))
    for name in names if len(names) > 1 else ():
        config = compose("config", overrides=[*hydra, name], return_hydra_config=True)
        if config.hydra.sweeper.params:
            raise ConfigError(
                f"{name} has a sweep of its own (hydra.sweeper.params), so it must be the only "
                "experiment of a command"
            )


def with_sweep_as_arms(command: Command) -> Command:
    """Return the command with its swept options turned into arms of one cell, where possible.

    A command with ``hydra/launcher=...`` or ``hydra/sweeper=...`` is returned unchanged, because
    these plugins distribute or choose cells: every combination of values must stay a cell.
    """
    from labkit.experiment.compose.sweep_as_arms import sweep_as_arms
    from labkit.experiment.hydra.hydra_composer import Composer
    from labkit.experiment.hydra.hydra_error_text import explain_config_error

    plugins = ("hydra/launcher=", "hydra/sweeper=")
    launched = any(o.startswith(plugins) for o in command.overrides)
    if not command.multirun or launched:
        return command
    hydra = [o for o in command.overrides if o.lstrip("+~").startswith("hydra")]
    task = [o for o in command.overrides if o not in hydra]
    with initialized():
        try:
            swept = sweep_as_arms(task, Composer(), hydra)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(explain_config_error(error, command.overrides)) from None
    return replace(command, overrides=(*hydra, *swept))


def print_config(command: Command) -> None:
    """Print what a command asks of its config; ``-m`` is ignored beside a flag that prints.

    Hydra does not know the overrides that a scale selects, so they are given to it. The config of
    a job is composed and printed here, because Hydra would compose it once more.
    """
    from labkit.experiment.compose.cell_composer import with_scale_overrides
    from labkit.experiment.hydra.hydra_composer import Composer

    overrides, flags = list(command.overrides), list(command.flags)
    topic = flags[flags.index("--cfg") + 1] if "--cfg" in flags else None
    if topic is None:
        run_hydra([*overrides, *flags])
        return
    others = {flag for flag in flags if flag in PRINT_FLAGS} - {"--cfg"}
    composer = Composer()
    with initialized():
        overrides = with_scale_overrides(overrides, composer)
        tree = composer.tree(overrides) if topic == "job" and not others else None
    if tree is None:
        run_hydra([*overrides, *flags])
        return
    package = flags[flags.index("--package") + 1] if "--package" in flags else ""
    print(config_text(tree, package, "--resolve" in flags), end="")


def config_text(tree: Any, package: str = "", resolve: bool = False) -> str:
    """Return a config as YAML, or its part ``package`` (``engine.kv``).

    Raises
    ------
    ConfigError
        The config has no such part.
    """
    from omegaconf import Container, OmegaConf

    if resolve:
        OmegaConf.resolve(tree)
    if package in ("", "_global_"):
        return OmegaConf.to_yaml(tree)
    part = OmegaConf.select(tree, package)
    require(part is not None, f"--package {package}: the config has no such part")
    if not isinstance(part, Container):
        return f"{part}\n"
    return f"# @package {package}\n{OmegaConf.to_yaml(part)}"


def launcher_of(command: Command) -> JobLauncher:
    """Return the launcher that the command selects, after checking that it can work here.

    A search needs a launcher that runs its cells in this process.

    Raises
    ------
    ConfigError
        The launcher cannot work here. The message is one line with the reason.
    """
    from hydra import compose

    from labkit.experiment.hydra.hydra_composer import first_cell
    from labkit.experiment.hydra.job_launcher import JobLauncher

    with initialized():
        first = first_cell(command.overrides)
        hydra = compose("config", overrides=first, return_hydra_config=True).hydra
        launcher = JobLauncher.of(hydra)
    launcher.check(command.multirun)
    return launcher


def run_hydra(argv: Sequence[str], study: Study | None = None) -> None:
    """Let Hydra run a checked command: each of its jobs runs one cell of the study.

    Hydra's exceptions reach the caller unchanged. ``study`` is None if the command only prints.
    """
    import logging

    import hydra

    def job(config: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        from labkit.experiment.hydra.hydra_composer import unresolved

        facts = HydraConfig.get()
        hydra, task = map(unresolved, (facts.overrides.hydra, facts.overrides.task))
        if study is not None:
            return run_job(study, hydra, task, facts)
        return None

    logging.raiseExceptions = False  # a closed pipe (``| head``) is not an error
    # The name that Hydra's completion completes; of ``python -m labkit`` it would be `python FILE`.
    sys.argv = ["labkit", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)


def run_job(study: Study, hydra: list[str], task: list[str], facts: Any) -> float | None:
    """Run the cell of one Hydra job. In a search, return the trial's objective, else None.

    In a search, a trial whose options contradict each other is skipped, and the objective is None.
    It is not NaN, because Optuna stops at NaN (hydra-optuna-sweeper 1.3.0). In any other command,
    all cells were checked before the first job, so such an error is raised.
    """
    from labkit.experiment.compose.cell_composer import compose_cell, write_config
    from labkit.experiment.compose.cell_name import cell_name
    from labkit.experiment.hydra.job_launcher import is_search

    folder, name = Path(facts.runtime.output_dir), cell_name(task)
    try:
        write_config(folder / str(facts.output_subdir) / "config.yaml", hydra, task)
        study.run(name, folder, lambda: compose_cell(hydra, task))
    except ConfigError as error:
        if not is_search(facts):
            raise
        say(f"{name}: not run: {error}")
        return None
    if not is_search(facts):
        return None
    value = study.objective(folder)
    say(f"{name}: objective {'unknown' if value is None else format(value, '.6g')}")
    return value


def study_folder(command: Command, absolute: bool = False) -> tuple[Path, list[str]]:
    """Return the study's folder, and the overrides with ``out=`` added if it is absent.

    ``absolute``: make the folder an absolute path, for cells that may run on other machines.
    """
    from labkit.config.environment_text import with_values
    from labkit.experiment.hydra.hydra_composer import hydra_quote

    named = [o.partition("=")[2].strip("'\"") for o in command.overrides if o.startswith("out=")]
    named = with_values(named)
    rest = [o for o in command.overrides if not o.startswith("out=")]
    out = Path(named[-1]) if named else _fresh_folder()
    if absolute:
        out = out.absolute()
        return out, [*rest, f"out={hydra_quote(str(out))}"]
    return out, [*command.overrides, *([] if named else [f"out={out}"])]


def unpacked_archive(archive: Path, overrides: Sequence[str], plan: bool) -> tuple[Path, list[str]]:
    """Unpack a study's archive into a folder beside it, so that the study can be continued.

    Returns the folder, and the overrides with this folder as ``out=``.

    Raises
    ------
    ConfigError
        The folder exists, the archive is not valid, or the command only plans.
    """
    from labkit.experiment.hydra.hydra_composer import hydra_quote
    from labkit.records import RecordError, unpack_archive

    folder = archive.with_suffix("")
    if plan:
        raise ConfigError(
            f"out={archive}: plan=true writes nothing; unpack the archive first with "
            f"python -m labkit.archive --unpack {archive} {folder}"
        )
    if folder.exists():
        raise ConfigError(f"out={archive}: its folder exists; continue the study with out={folder}")
    try:
        unpack_archive(archive, folder)
    except RecordError as error:
        raise ConfigError(str(error)) from None
    rest = [word for word in overrides if not word.startswith("out=")]
    return folder, [*rest, f"out={hydra_quote(str(folder))}"]


def _fresh_folder() -> Path:
    from datetime import datetime

    stem = f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}"
    stems = (stem, *(f"{stem}-{n}" for n in range(2, 1000)))
    return next(Path(o) for o in stems if not Path(o).exists())


def run(command: Command) -> int:
    """Run a study, or print its plan, and return the exit code."""
    from labkit.cli.study_runner import Study
    from labkit.config import count_text
    from labkit.experiment.hydra.job_launcher import is_lost_job
    from labkit.machine import cache_dir

    typed, command = command, with_sweep_as_arms(command)
    with cache_dir.recorded_entries() as written:
        cells, launcher = compose_cells(command), launcher_of(command)
        out, overrides = study_folder(command, absolute=not launcher.is_local)
        archive = out if out.suffix == ARCHIVE_SUFFIX and out.is_file() else None
        plan = cells[0].experiment.plan
        if archive is not None:
            out, overrides = unpacked_archive(archive, overrides, plan)
        study = Study(out, [] if launcher.is_search else cells)
        try:
            study.refuse_changes()
            if launcher.is_local and not plan:
                study.check_servers()
        except ConfigError:
            if archive is not None:
                shutil.rmtree(out)
            raise
        if archive is not None:
            say(f"{archive} unpacked; the study continues in {out}")
        if plan:
            from labkit.experiment.compose.user_class_check import check_imports
            from labkit.experiment.schedule.plan_preview import print_plan

            check_imports(cells)
            print_plan(cells, out, written)
            return 0
    _create(out)
    same_command = _resuming_command(typed, overrides)
    jobs, lost_jobs = launcher.watch_jobs(), list[str]()
    if not launcher.is_local:
        cells_to_run = count_text(len(cells), "cell")
        say(f"{cells_to_run} sent to hydra/launcher={launcher.name}; waiting for the results")
    try:
        run_hydra([*overrides, *(["-m"] if command.multirun else [])], study)
    except KeyboardInterrupt:
        running = "".join(f"; Slurm job {job} keeps running" for job in jobs.running())
        say(f"interrupted; all records are kept{running}. Continue with: {same_command}")
        return 130
    except Exception as error:
        if not is_lost_job(error):
            raise
        lost_jobs = [str(error).split("\n")[0]]
    jobs.wait()
    status = study.finish()
    if not launcher.is_local:
        missing = [*(jobs.failures() or lost_jobs), *study.unfinished()]
        for line in missing:
            say(line)
        if missing:
            say(f"all records are kept; continue with: {same_command}")
    return status


def _resuming_command(typed: Command, overrides: Sequence[str]) -> str:
    """Return the command that continues the study: the typed one, with ``out=`` added."""
    from labkit.experiment.hydra.hydra_composer import config_folders

    out = [override for override in overrides if override.startswith("out=")]
    words = [word for folder in config_folders(overrides) for word in ("--config-dir", folder)]
    given = ("out=", "hydra.searchpath=")
    words += [*(o for o in typed.overrides if not o.startswith(given)), *out]
    return " ".join(["python -m labkit", *_quoted(words), *(["-m"] * typed.multirun)])


def _create(out: Path) -> None:
    """Create a study's folder now, so that an error message names the option ``out``."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"out={out}: the folder cannot be created ({reason}); choose another with out=DIR"
        ) from None


def _quoted(words: Sequence[str]) -> list[str]:
    import shlex

    return [shlex.quote(word) for word in words]


def say(line: str) -> None:
    """Write one line to standard error."""
    print(f"labkit: {line}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run ``python -m labkit`` (and the console script ``labkit``)."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if "--version" in words:
        print(f"labkit {__version__}")
        sys.exit(0)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # so that ``package.module:Class`` is found in the working folder
    try:
        command = parse(words)
        register()
        if command.only_prints:
            print_config(command)
            sys.exit(0)
        sys.exit(run(command))
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
    except ConfigError as error:
        say(str(error))
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        _exit_with(error, words)


def _exit_with(error: Exception, words: Sequence[str]) -> NoReturn:
    from labkit.experiment.hydra.hydra_error_text import explain_config_error

    if type(error).__module__.split(".")[0] in ("hydra", "omegaconf", "yaml", "antlr4"):
        say(explain_config_error(error, words))
        sys.exit(2)
    from labkit.engine.user_classes import UserClassError
    from labkit.experiment import StudyError

    if isinstance(error, UserClassError):
        say(f"{error}; python -m labkit.check {error.path} shows the traceback")
        sys.exit(2)
    if isinstance(error, OSError) and error.filename and error.errno in UNWRITABLE:
        say(f"out: cannot write {error.filename} ({error.strerror}); set another folder, out=DIR")
        sys.exit(2)
    if isinstance(error, StudyError | OSError):
        say(one_line(error))
        sys.exit(1)
    if isinstance(error, ValueError) and type(error).__module__.startswith("labkit."):
        say(one_line(error))  # an unwritable cache, a BLAS that can't be built
        sys.exit(2)
    raise error
