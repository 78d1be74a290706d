"""The study command: one command is one study, one Hydra job is one cell."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cli.hydra_arguments import CONF, Command
from labkit.cli.multirun_composition import compose_cells, launcher_of, with_sweep_as_arms
from labkit.config import ConfigError, require
from labkit.config.option_index import override_key
from labkit.machine.exception_text import one_line
from labkit.records import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from labkit.cli.study_runner import StudyRunner
    from labkit.experiment.compose.cell_composer import ComposedCell
    from labkit.experiment.hydra.job_launchers import JobLauncher


def run(command: Command, pictures: bool = True) -> int:
    """Run a study, or print its plan, and return the exit code.

    ``pictures``: whether to draw the report's pictures in files, once the answer is printed.
    """
    from labkit.cli.study_runner import StudyRunner
    from labkit.config import count_text
    from labkit.machine import cache_entries

    typed = command
    with cache_entries.recorded_entries() as written, unpacked_archive(command) as unpacked:
        command = with_sweep_as_arms(unpacked)
        cells, launcher = compose_cells(command), launcher_of(command)
        out, overrides = study_folder(command, absolute=not launcher.is_local)
        study = StudyRunner(out, [] if launcher.is_search else cells)
        study.refuse_changes()
        if cells[0].experiment.plan:
            archive = named_folder(typed)
            require(
                unpacked is typed,
                f"out={archive}: plan=true writes nothing; unpack the archive first with "
                f"python -m labkit.archive --unpack {archive} FOLDER",
            )
            _print_plan(cells, launcher, out, written)
            return 0
        if launcher.is_local:
            study.check_servers()
            _check_creatable(out)
            study.prepare()
    if named_folder(command) is None:
        study.out, overrides = study_folder(command, not launcher.is_local, create=True)
    _create(study.out)
    if not launcher.is_local:
        cells_to_run = count_text(len(cells), "cell")
        say(f"{cells_to_run} sent to hydra/launcher={launcher.name}; waiting for the results")
    argv = [*overrides, *(["-m"] if command.multirun else [])]
    return _measure(study, argv, launcher, _resuming_command(typed, overrides), pictures)


def _print_plan(
    cells: Sequence[ComposedCell], launcher: JobLauncher, out: Path, written: Sequence[Path]
) -> None:
    """Print the plan of a study; ``written`` is as in ``print_plan``."""
    from labkit.experiment.compose.user_class_import_check import check_imports
    from labkit.experiment.progress_display import format_duration
    from labkit.experiment.schedule.noise_history import StudyHistory
    from labkit.experiment.schedule.plan_preview import print_plan

    check_imports(cells)
    seconds = print_plan(cells, StudyHistory(out), out, written)
    if launcher.is_search:
        trials = launcher.trials
        each = f"; {trials} take about {format_duration(trials * seconds)}" if trials else ""
        say(f"this is one trial of a search by hydra/sweeper={launcher.sweeper}{each}")


def _measure(
    study: StudyRunner, argv: Sequence[str], launcher: JobLauncher, again: str, pictures: bool
) -> int:
    """Run a study's cells and return the exit code; ``again``: the command that continues it."""
    from labkit.experiment.hydra.job_launchers import is_lost_job

    jobs, lost_jobs = launcher.watch_jobs(), list[str]()
    try:
        try:
            run_hydra(argv, study)
        except Exception as error:
            if not is_lost_job(error):
                if launcher.is_local:
                    with suppress(Exception, KeyboardInterrupt):  # this error is the answer
                        study.finish(pictures)  # the report of the other cells
                raise
            lost_jobs = [str(error).split("\n")[0]]
        jobs.wait()
        status = study.finish(pictures)
    except KeyboardInterrupt:
        for line in study.decided():
            say(line)
        running = "".join(f"; Slurm job {job} keeps running" for job in jobs.running())
        say(f"interrupted; all records are kept{running}. Continue with: {again}")
        return 130
    if not launcher.is_local:
        missing = [*(jobs.failures() or lost_jobs), *study.unfinished()]
        for line in missing:
            say(line)
        if missing:
            say(f"all records are kept; continue with: {again}")
    return status


def run_hydra(argv: Sequence[str], study: StudyRunner | None = None) -> None:
    """Let Hydra run a checked command: each of its jobs runs one cell of the study.

    Hydra's exceptions reach the caller unchanged, and a cell's once the other cells have run.
    ``study`` is None if the command only prints.
    """
    import logging

    import hydra

    errors: list[Exception] = []

    def job(config: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        from labkit.experiment.compose.cell_name import cell_name
        from labkit.experiment.hydra.hydra_composer import unresolved
        from labkit.experiment.hydra.job_launchers import is_search

        facts = HydraConfig.get()
        hydra, task = map(unresolved, (facts.overrides.hydra, facts.overrides.task))
        if study is None:
            return None
        try:
            return run_job(study, hydra, task, facts)
        except Exception as error:
            if is_search(facts) or not study.is_first_process:
                raise
            errors.append(error)  # Hydra would print a line of its own before it is raised
            if study.has_several_cells:
                say(f"{cell_name(task)}: {one_line(error)}")
            return None

    logging.raiseExceptions = False  # a closed pipe (``| head``) is not an error
    sys.argv = ["labkit", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
    if errors:
        raise errors[0]


def run_job(study: StudyRunner, hydra: list[str], task: list[str], facts: Any) -> float | None:
    """Run the cell of one Hydra job. In a search, return the trial's objective, else None.

    In a search, a trial whose options contradict each other is skipped, and the objective is None.
    It is not NaN, because Optuna stops at NaN (hydra-optuna-sweeper 1.3.0). In any other command,
    all cells were checked before the first job, so such an error is raised.
    """
    from labkit.experiment.compose.cell_composer import compose_cell, write_config
    from labkit.experiment.compose.cell_name import cell_name
    from labkit.experiment.hydra.job_launchers import is_search

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


def named_folder(command: Command) -> Path | None:
    """Return the folder that a command names with ``out=``, or None."""
    from labkit.experiment.compose.cell_name import study_folders

    return next(reversed(study_folders(command.overrides)), None)


def study_folder(
    command: Command, absolute: bool = False, create: bool = False
) -> tuple[Path, list[str]]:
    """Return the study's folder, and the overrides with ``out=`` added if it is absent.

    ``absolute``: make the folder an absolute path, for cells that may run on other machines.
    ``create``: create a folder that the command does not name, so that no other command gets it.
    """
    from labkit.experiment.hydra.hydra_composer import hydra_quote

    named = named_folder(command)
    rest = [o for o in command.overrides if override_key(o) != "out"]
    out = named or _fresh_folder(create)
    if absolute:
        out = out.absolute()
        return out, [*rest, f"out={hydra_quote(str(out))}"]
    return out, [*command.overrides, *([] if named else [f"out={out}"])]


@contextmanager
def claimed_folder(named: Path | None, plan: bool = False) -> Iterator[Path]:
    """Yield the named folder, or a new one, which is removed if nothing is written into it.

    ``plan``: whether the command only plans; then the new folder is not created.
    """
    out = named or _fresh_folder(create=not plan)
    try:
        yield out
    finally:
        if named is None:
            with suppress(OSError):  # it is not empty, or was not created
                os.removedirs(out)


def _fresh_folder(create: bool) -> Path:
    from datetime import datetime

    stem = f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}"
    stems = (stem, *(f"{stem}-{n}" for n in range(2, 1000)))
    unused = (Path(o) for o in stems if not Path(o).exists())
    return next(out for out in unused if not create or _is_created(out))


def _is_created(out: Path) -> bool:
    """Create a folder; return False if another command has just created it."""
    try:
        out.mkdir(parents=True)
        return True
    except FileExistsError:
        return False


@contextmanager
def unpacked_archive(command: Command) -> Iterator[Command]:
    """Yield the command; if its ``out=`` is a study's archive, with a folder unpacked beside it.

    The study's folder tells how its cells are called, so it is there before they are composed. It
    is removed if the context fails. Raises ``ConfigError`` if the folder exists or the archive is
    not valid.
    """
    from labkit.experiment.hydra.hydra_composer import hydra_quote
    from labkit.records import RecordError, unpack_archive

    archive = named_folder(command)
    if archive is None or archive.suffix != ARCHIVE_SUFFIX or not archive.is_file():
        yield command
        return
    folder = archive.with_suffix("")
    require(
        not folder.exists(),
        f"out={archive}: its folder exists; continue the study with out={folder}",
    )
    try:
        unpack_archive(archive, folder)
    except RecordError as error:
        raise ConfigError(str(error)) from None
    rest = [word for word in command.overrides if override_key(word) != "out"]
    try:
        yield replace(command, overrides=(*rest, f"out={hydra_quote(str(folder))}"))
    except BaseException:
        shutil.rmtree(folder)
        raise
    say(f"{archive} unpacked; the study continues in {folder}")


def _resuming_command(typed: Command, overrides: Sequence[str]) -> str:
    """Return the command that continues the study: the typed one, with ``out=`` added."""
    from labkit.experiment.hydra.hydra_composer import config_folders

    out = [override for override in overrides if override_key(override) == "out"]
    words = [word for folder in config_folders(overrides) for word in ("--config-dir", folder)]
    given = ("out", "hydra.searchpath")
    words += [*(o for o in typed.overrides if override_key(o) not in given), *out]
    return " ".join(["python -m labkit", *map(shlex.quote, words), *(["-m"] * typed.multirun)])


def _create(out: Path) -> None:
    """Create a study's folder now, so that an error message names the option ``out``."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_creatable(out, error.strerror or type(error).__name__) from None


def _check_creatable(out: Path) -> None:
    """Refuse a folder that :func:`_create` cannot create, before anything is prepared for it."""
    path = out.absolute()
    place = next(one for one in (path, *path.parents) if one.exists())
    if not place.is_dir():
        raise _not_creatable(out, os.strerror(errno.ENOTDIR))
    if place != path and not os.access(place, os.W_OK):
        raise _not_creatable(out, os.strerror(errno.EACCES))


def _not_creatable(out: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"out={out}: the folder cannot be created ({reason}); choose another with out=DIR"
    )


def say(line: str) -> None:
    """Write one line to standard error."""
    print(f"labkit: {line}", file=sys.stderr)
