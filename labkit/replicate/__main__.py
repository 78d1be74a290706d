"""``python -m labkit.replicate STUDY.zip [key=value ...]``: repeat an author's comparison here.

STUDY is an archive, a study's folder, or an article (Markdown), whose tables' archives are all
repeated, except those that cannot run here. Arguments ``key=value`` are options of the reader:
``plan=true`` only says what would be run and decided, ``design.time=30m`` takes longer than the ten
minutes of the default, ``model.path=DIR`` names the model on this machine, ``out=DIR`` the folder.
Any other option of the engine, model or workload asks another question, and the result says so.
Exit codes: 0 if all runs and gates pass, whatever was decided; 1 if one fails; 2, with a line for
each reason, if the archive is invalid or this machine cannot run it (of an article: can run none of
its archives); 130 if interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import records
from labkit.cli.program_base import Program, print_error
from labkit.config import ConfigError, require
from labkit.machine.facts import code_revision
from labkit.records import ARCHIVE_SUFFIX, RecordError, StudyPath
from labkit.replicate import original_study
from labkit.replicate.original_study import TIME_S, AuthorsCell, ReaderOptions

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis

OURS, THEIRS = "ours", "theirs"
MLX_BACKENDS = ("mlx-cpu", "mlx-metal")  # installed beside mlx, in its version
PROG = "python -m labkit.replicate"


@dataclass(frozen=True)
class AuthorsStudy:
    """A study of the author's, the folder for the reader's, and what that will decide.

    ``sources``: the folder of the author's own classes, once they are unpacked.
    """

    path: StudyPath
    cells: tuple[AuthorsCell, ...]
    out: Path
    analyses: Sequence[CellAnalysis] = ()
    forecast: tuple[str, ...] = ()
    sources: Path | None = None

    @property
    def other_revisions(self) -> list[str]:
        """The author's commits of labkit, without an unknown one and the one here."""
        known = {one.get("git") for one in self.environments}
        return sorted(git for git in known - {code_revision.commit()} if git)

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """The machine and software of each cell that has run.

        They are of its first run of an arm without an environment of its own, or else of any arm.
        """
        runs = {one.data.dir.name: one.data.records for one in self.analyses}
        found: list[Mapping[str, Any]] = []
        for cell in self.cells:
            own = {arm.name for arm in cell.arms if arm.environment}
            shared = (run.environment for run in runs.get(cell.name, ()) if run.arm not in own)
            found.append(next(filter(None, shared), cell.environment))
        return [one for one in found if one]

    def changes(self, reader: ReaderOptions) -> list[str]:
        return list(dict.fromkeys(text for cell in self.cells for text in cell.changes(reader)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.engine.user_classes import UserClassError
    from labkit.experiment import StudyError
    from labkit.machine.cache_entries import CacheError

    parser = Program(
        prog=PROG,
        usage="%(prog)s STUDY [KEY=VALUE ...] [--versions {ours,theirs}] [--trust]",
        description="Repeat an author's comparison on this machine.",
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="STUDY [key=value ...]",
        help="archive or folder of a study, or an article; and options such as plan=true",
    )
    versions = "whose versions of mlx, numpy, ... and, in a checkout, of labkit run it"
    parser.add_argument("--versions", choices=(OURS, THEIRS), default=OURS, help=versions)
    trusted = "run the classes, commands, packages and servers that the author's arms name"
    parser.add_argument("--trust", action="store_true", help=trusted)
    refused = (ConfigError, RecordError, CacheError, UserClassError)
    return parser.run(argv, _run, refused=refused, failed=(StudyError,))


def _run(options: argparse.Namespace) -> int:
    from labkit.cli import hydra_arguments, multirun_composition, run_study

    sources = [word for word in options.words if "=" not in word or Path(word).exists()]
    require(len(sources) == 1, f"{len(sources)} studies: name one archive, folder or article")
    multirun_composition.register()
    command = hydra_arguments.parse([word for word in options.words if word not in sources])
    given, named = ReaderOptions.parse(command.overrides), run_study.named_folder(command)
    with run_study.claimed_folder(named, bool(given.values.get("plan"))) as out:
        return _replicate_all(Path(sources[0]), out, given, options)


def _replicate_all(
    source: Path, out: Path, given: ReaderOptions, options: argparse.Namespace
) -> int:
    """Repeat a study, or all of an article, in the folder ``out``; return the exit code."""
    from labkit.analysis.pages.article_from_records import table_archives
    from labkit.analysis.pages.replication_page import write_replications
    from labkit.experiment.progress_display import format_duration

    status, cells = 0, 0
    article = source.is_file() and source.suffix != ARCHIVE_SUFFIX
    pairs, refused = list[tuple[AuthorsStudy, ReaderOptions]](), dict[str, str]()
    archives = table_archives(source) if article else [source]
    names = _folder_names(archives)
    for path in archives:
        own = out / names[path] if article else out
        try:
            study = _open(path, own)
            cells += len(study.cells)
            study, reader, lines = _ready(study, given, options)
        except (ConfigError, RecordError) as error:
            if not article:
                raise
            lines = [str(error).removeprefix(f"{path}: ").replace(str(path), "it")]
        for line in lines:
            print_error(PROG, f"{path.name}: cannot run here: {line}" if article else line)
        if lines:
            refused[path.name] = "; ".join(lines)
        else:
            pairs.append((study, reader))
    # The same whichever can run here, so that the study continues once another can.
    time_s = TIME_S / max(1, cells)
    if given.values.get("plan"):
        planned_s = sum(_plan(study, reader, time_s) for study, reader in pairs)
        if len(pairs) > 1:
            print(f"{len(pairs)} studies, estimated {format_duration(planned_s)} in all")
        return 0 if pairs else 2
    for study, reader in pairs:
        with _continuing(options, out), _importing(study.sources):
            status = max(status, _replicate(study, reader, options.versions, time_s))
    if article and pairs:
        print(write_replications(out, refused))
    return status if pairs else 2


def _folder_names(archives: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each archive's study; those of one name begin with their folder's."""
    names = [path.name for path in archives]
    prefixes = (f"{path.parent.name}-" if names.count(path.name) > 1 else "" for path in archives)
    stems = (name.removesuffix(ARCHIVE_SUFFIX) for name in names)
    return {path: f"{a}{b}" for path, a, b in zip(archives, prefixes, stems, strict=True)}


def _ready(
    study: AuthorsStudy, given: ReaderOptions, options: argparse.Namespace
) -> tuple[AuthorsStudy, ReaderOptions, list[str]]:
    """Return an author's study, the reader's options, and the reasons why it cannot run here."""
    _refuse_authors_runs(study)
    lines = list[str]()
    if options.trust:
        study = _with_inputs(study, bool(given.values.get("plan")))
    else:
        lines = [part for cell in study.cells for part in original_study.trusted_parts(cell)]
    with _importing(study.sources):
        reader = given if lines else _reader(study, given, options.versions)
        study.changes(reader)  # refuses an option that is the question
        for cell in () if lines else study.cells:
            lines += original_study.cell_obstacles(cell, reader)
    return study, reader, list(dict.fromkeys(lines))


def _open(path: Path, out: Path) -> AuthorsStudy:
    from labkit.analysis.studies.replication import forecast_lines
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.analysis.studies.study_discovery import cell_dirs

    if not path.exists():
        raise RecordError(f"{path}: no such file or folder")
    opened = records.open_study(path)
    folders = cell_dirs(opened)
    for folder in folders:
        if isinstance(folder, Path):  # an archive was checked when it was opened
            records.check_digests(folder)
    cells, analyses = original_study.authors_cells(opened, folders), AnalysisCache().study(opened)
    return AuthorsStudy(opened, cells, out, analyses, tuple(forecast_lines(analyses)))


def _with_inputs(study: AuthorsStudy, plan: bool) -> AuthorsStudy:
    """Unpack an archive's sources and texts, and say so."""
    path = study.path
    files = dict(records.regular_files(path)) if isinstance(path, Path) else path.archive.files
    names = [name for name in files if name.startswith(("sources/", "inputs/"))]
    if not names:
        return study
    require(not plan, "plan=true writes nothing, and --trust would unpack the archive's sources")
    folder = (study.out / "from_author").resolve()
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((path / name).read_bytes())
        print(f"labkit.replicate: from the author: {target}", file=sys.stderr)
    inputs = {n.partition("/")[2]: str(folder / n) for n in names if n.startswith("inputs/")}
    cells = tuple(replace(cell, inputs=inputs) for cell in study.cells)
    return replace(study, cells=cells, sources=folder / "sources")


@contextmanager
def _importing(sources: Path | None) -> Iterator[None]:
    """Put an author's classes on the Python path, and forget them afterwards.

    Two archives of an article may have modules of one name.
    """
    if sources is None:
        yield
        return
    root, inherited = str(sources), os.environ.get("PYTHONPATH")
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, inherited]))
    try:
        yield
    finally:
        sys.path.remove(root)
        del os.environ["PYTHONPATH"]
        if inherited is not None:
            os.environ["PYTHONPATH"] = inherited
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(root + os.sep):
                del sys.modules[name]


def _reader(study: AuthorsStudy, reader: ReaderOptions, versions: str) -> ReaderOptions:
    """Return the reader's options, with the author's packages if they are to be installed."""
    from importlib import metadata

    from labkit.machine.facts import machine_snapshot

    if versions == OURS:
        return reader
    versions_of = [(one.get("git"), one.get("versions") or {}) for one in study.environments]
    software = {(git, *sorted(packages.items())) for git, packages in versions_of}
    require(
        len(software) < 2,
        f"{study.path}: its cells ran with {len(software)} sets of versions, and --versions theirs "
        "takes one; name the folder of one cell (python -m labkit.archive --unpack makes them)",
    )
    theirs = versions_of[0][1] if versions_of else {}
    require(bool(theirs), f"{study.path}: its records name no versions of packages")
    here = machine_snapshot.versions()
    differing = {n: v for n, v in theirs.items() if n != "labkit" and here.get(n, v) != v}
    backends = {dist.name for dist in metadata.distributions()} & set(MLX_BACKENDS)
    differing |= {name: differing["mlx"] for name in sorted(backends) if "mlx" in differing}
    packages = tuple(f"{n}=={v}" for n, v in differing.items())
    return _with_revision(study, replace(reader, requirements=packages))


def _with_revision(study: AuthorsStudy, reader: ReaderOptions) -> ReaderOptions:
    """Add the author's revision of labkit; if it does not run here, say so and leave it out."""
    from labkit.experiment.launch.exported_revision import RevisionError

    theirs = replace(reader, revision=next(iter(study.other_revisions), None))
    try:
        for cell in study.cells if theirs.revision else ():
            cell.composed(theirs, TIME_S)
    except ConfigError as error:
        if isinstance(error, RevisionError) or "environment.revision" in str(error):
            print_error(PROG, f"this machine's labkit runs, not the author's revision: {error}")
        return reader
    return theirs


def _plan(study: AuthorsStudy, reader: ReaderOptions, time_s: float) -> float:
    """Print what would be run, how long it takes, and what it decides; return the seconds."""
    from labkit.experiment.schedule.noise_history import StudyHistory
    from labkit.experiment.schedule.plan_preview import print_plan
    from labkit.machine import cache_entries

    with cache_entries.recorded_entries() as written:
        cells = [cell.composed(reader, time_s) for cell in study.cells]
        history = StudyHistory(study.out, [cell.measured for cell in study.cells])
        seconds = print_plan(cells, history, study.out, written)
    lines = [*study.forecast, *(f"another question: {x}" for x in study.changes(reader))]
    if study.other_revisions and reader.revision is None:
        revisions = " and ".join(revision[:12] for revision in study.other_revisions)
        lines.append(f"labkit's revision is this machine's, not the author's {revisions}")
    print("\n".join(lines))
    return seconds


@contextmanager
def _continuing(options: argparse.Namespace, out: Path) -> Iterator[None]:
    """If interrupted, print the command that continues."""
    from labkit.experiment.hydra.hydra_composer import hydra_quote

    try:
        yield
    except KeyboardInterrupt:
        words = [word for word in options.words if not word.startswith("out=")]
        words += [f"out={hydra_quote(str(out))}", f"--versions={options.versions}"]
        words += ["--trust"] * options.trust
        print_error(PROG, f"interrupted; continue with: {PROG} {shlex.join(words)}")
        raise


def _replicate(study: AuthorsStudy, reader: ReaderOptions, versions: str, time_s: float) -> int:
    """Run one study, compare it with the author's, write the pages and return the exit code."""
    from labkit.analysis.pages.replication_page import decision_text, write_replication
    from labkit.analysis.studies.replication import replication_of
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.cli.study_runner import StudyRunner

    composed = [cell.composed(reader, time_s) for cell in study.cells]
    runner, changes = StudyRunner(study.out, composed), study.changes(reader)
    runner.refuse_changes()
    runner.prepare()
    study.out.mkdir(parents=True, exist_ok=True)
    for cell in composed:
        runner.run(cell.name, study.out / cell.name)
    status, here = runner.finish(), AnalysisCache().study(study.out)
    page = replication_of((study.path, study.analyses), (study.out, here), changes, versions)
    write_replication(study.out, page)
    for row in page.rows:
        print(f"{page.name_of(row)}: {decision_text(row)}")
    print(f"{page.answer}: {study.out / 'replication.html'} and {study.out / 'replication.json'}")
    return status


def _refuse_authors_runs(study: AuthorsStudy) -> None:
    """Refuse a folder with runs of the author's: they would replicate themselves."""
    theirs = {record.started for analysis in study.analyses for record in analysis.data.records}
    for path in (p for cell in study.cells for p in records.record_paths(study.out / cell.name)):
        own = records.read_json(path).get("started") not in theirs
        require(own, f"{study.out} holds the author's own runs; set another folder, out=NAME")


if __name__ == "__main__":
    sys.exit(main())
