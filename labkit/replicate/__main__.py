"""``python -m labkit.replicate STUDY.zip [key=value ...]``: repeat an author's comparison here.

STUDY is an archive, a study's folder, or an article (Markdown), whose tables' archives are all
repeated. Arguments ``key=value`` are options of the reader: ``plan=true`` only says what would be
run and decided, ``design.time=30m`` takes longer than the ten minutes of the default,
``model.path=DIR`` names the model on this machine, ``out=DIR`` the folder. Any other option of the
engine, model or workload asks another question, and the result says so. Exit codes: 0 if all runs
and gates are good, whatever was decided; 1 if one failed; 2, with a line for each reason, if the
archive is not valid or this machine cannot run it; 130 if interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.cli.program import Program, print_error
from labkit.config import ConfigError, require
from labkit.records import (
    ARCHIVE_SUFFIX,
    ArchivePath,
    RecordError,
    StudyPath,
    check_digests,
    open_study,
)
from labkit.replicate import article_archives, obstacles_here
from labkit.replicate.authors_question import TIME_S, AuthorsCell, ReaderOptions, authors_cells

OURS, THEIRS = "ours", "theirs"
MLX_BACKENDS = ("mlx-cpu", "mlx-metal")  # installed beside mlx, in its version
PROG = "python -m labkit.replicate"


@dataclass(frozen=True)
class AuthorsStudy:
    """A study of the author's, its cells, and the folder for the reader's."""

    path: StudyPath
    cells: tuple[AuthorsCell, ...]
    out: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    from labkit.experiment import StudyError

    parser = Program(prog=PROG, description="Repeat an author's comparison on this machine.")
    parser.add_argument(
        "words",
        nargs="+",
        metavar="STUDY [key=value ...]",
        help="archive or folder of a study, or an article; and options such as plan=true",
    )
    parser.add_argument(
        "--versions",
        choices=(OURS, THEIRS),
        default=OURS,
        help="whose versions of mlx, numpy, ... run it; theirs are installed into the cache",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the classes, commands, packages and servers that the author's arms name",
    )
    return parser.run(argv, _run, refused=(ConfigError, RecordError), failed=(StudyError,))


def _run(options: argparse.Namespace) -> int:
    from labkit.cli import command_line, study_command, study_composer

    sources = [word for word in options.words if "=" not in word or Path(word).exists()]
    require(len(sources) == 1, f"{len(sources)} studies: name one archive, folder or article")
    words = [word for word in options.words if word not in sources]
    study_composer.register()
    command = command_line.parse(words)
    reader = ReaderOptions.parse(command.overrides)
    out = study_command.study_folder(command)[0]
    studies = _studies(Path(sources[0]), out)
    if options.trust:
        studies = [_with_inputs(study, bool(reader.values.get("plan"))) for study in studies]
    lines = [] if options.trust else _untrusted(studies)
    time_s = TIME_S / sum(len(study.cells) for study in studies)
    readers = [_reader(study, reader, options.versions) for study in studies]
    if not lines:
        for study, own in zip(studies, readers, strict=True):
            for cell in study.cells:
                cell.refuse_question(own)
                lines += obstacles_here.cell_obstacles(cell, own, time_s)
    if lines:
        for line in dict.fromkeys(lines):
            print_error(PROG, line)
        return 2
    pairs = zip(studies, readers, strict=True)
    if reader.values.get("plan"):
        for study, own in pairs:
            _plan(study, own, time_s)
        return 0
    return _replicate_all(list(pairs), options, time_s, out)


def _studies(source: Path, out: Path) -> list[AuthorsStudy]:
    """Open the source's studies; raise ``RecordError`` if one is not valid."""
    from labkit.analysis.studies.study_analysis import cell_dirs, study_name

    if source.is_file() and source.suffix != ARCHIVE_SUFFIX:
        paths = article_archives.table_archives(source)
    else:
        paths = [source]
    found = []
    for path in paths:
        opened = open_study(path)
        folders = cell_dirs(opened)
        for folder in folders:
            check_digests(folder) if isinstance(folder, Path) else None
        own = out / study_name(opened) if len(paths) > 1 else out
        found.append(AuthorsStudy(opened, tuple(authors_cells(opened, folders)), own))
    return found


def _untrusted(studies: Sequence[AuthorsStudy]) -> list[str]:
    parts = [
        part for s in studies for cell in s.cells for part in obstacles_here.trusted_parts(cell)
    ]
    return [f"{part}: it is the author's, not labkit's; --trust runs it" for part in parts]


def _with_inputs(study: AuthorsStudy, plan: bool) -> AuthorsStudy:
    """Unpack the sources and texts of an archive, say so, and put the sources on the Python path.

    Raises
    ------
    ConfigError
        The command only plans, so that nothing may be written.
    """
    if not isinstance(study.path, ArchivePath):
        return study
    archive = study.path.archive
    names = [name for name in archive.files if name.startswith(("sources/", "inputs/"))]
    if not names:
        return study
    require(
        not plan, "plan=true writes nothing, and the archive has sources to unpack; leave it out"
    )
    folder = study.out / "from_author"
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read(name))
        print(f"labkit.replicate: from the archive: {path}", file=sys.stderr)
    root = str((folder / "sources").resolve())
    sys.path.insert(0, root)
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *known])
    texts = [name for name in names if name.startswith("inputs/")]
    inputs = {name.partition("/")[2]: str((folder / name).resolve()) for name in texts}
    cells = tuple(replace(cell, inputs=inputs) for cell in study.cells)
    return replace(study, cells=cells)


def _reader(study: AuthorsStudy, reader: ReaderOptions, versions: str) -> ReaderOptions:
    """Return the reader's options, with the author's packages if they are to be installed.

    Raises
    ------
    ConfigError
        The author's versions are not known.
    """
    if versions == OURS:
        return reader
    from importlib import metadata

    from labkit.machine.facts import fingerprint

    theirs = next((v for cell in study.cells if (v := _versions_of(cell))), {})
    require(bool(theirs), f"{study.path}: its records name no versions of packages")
    here = fingerprint.versions()
    differing = {
        name: version
        for name, version in theirs.items()
        if name != "labkit" and version is not None and here.get(name) not in (None, version)
    }
    backends = {dist.name for dist in metadata.distributions()} & set(MLX_BACKENDS)
    differing |= {name: differing["mlx"] for name in sorted(backends) if "mlx" in differing}
    return replace(reader, requirements=tuple(f"{n}=={v}" for n, v in differing.items()))


def _versions_of(cell: AuthorsCell) -> dict[str, str]:
    return dict((cell.manifest.get("environment") or {}).get("versions") or {})


def _plan(study: AuthorsStudy, reader: ReaderOptions, time_s: float) -> None:
    """Print what would be run, how long it takes, and what it decides."""
    from labkit.analysis.studies.replication import forecast_lines
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.experiment.schedule.plan_preview import print_plan
    from labkit.machine import cache_dir

    with cache_dir.recorded_entries() as written:
        composed = [cell.composed(reader, time_s) for cell in study.cells]
        print_plan(composed, study.out, written)
    for line in forecast_lines(AnalysisCache().study(study.path)):
        print(line)
    for change in _changes(study, reader):
        print(f"another question: {change}")


def _changes(study: AuthorsStudy, reader: ReaderOptions) -> list[str]:
    return list(dict.fromkeys(text for cell in study.cells for text in cell.changes(reader)))


def _replicate_all(
    pairs: Sequence[tuple[AuthorsStudy, ReaderOptions]],
    options: argparse.Namespace,
    time_s: float,
    out: Path,
) -> int:
    from labkit.analysis.pages.replication_page import write_replications

    status = 0
    try:
        for study, reader in pairs:
            status = max(status, _replicate(study, reader, options.versions, time_s))
    except KeyboardInterrupt:
        words = " ".join([*options.words, *(["--trust"] if options.trust else [])])
        again = words if f"out={out}" in options.words else f"{words} out={out}"
        print(f"labkit.replicate: interrupted; continue with: {PROG} {again}", file=sys.stderr)
        raise
    if len(pairs) > 1:
        print(write_replications(out))
    return status


def _replicate(study: AuthorsStudy, reader: ReaderOptions, versions: str, time_s: float) -> int:
    """Run one study, compare it with the author's, write the pages and return the exit code."""
    from labkit.analysis.pages.replication_page import decision_text, write_replication
    from labkit.analysis.studies.replication import replication_of
    from labkit.analysis.studies.study_analysis import AnalysisCache
    from labkit.cli.study_runner import StudyRunner

    changes = _changes(study, reader)
    composed = [cell.composed(reader, time_s) for cell in study.cells]
    runner = StudyRunner(study.out, composed)
    runner.refuse_changes()
    study.out.mkdir(parents=True, exist_ok=True)
    for cell in composed:
        runner.run(cell.name, study.out / cell.name)
    status = runner.finish()
    cache = AnalysisCache()
    author, here = cache.study(study.path), cache.study(study.out)
    page = replication_of((study.path, author), (study.out, here), changes, versions)
    write_replication(study.out, page)
    for row in page.rows:
        print(f"{row.name}: {decision_text(row)}")
    print(f"{page.answer}: {study.out / 'replication.html'} and {study.out / 'replication.json'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
