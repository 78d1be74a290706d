"""``python -m labkit.archive DIR STUDY.zip``: write a study as one file.

The file holds the records, the reports and the machines' fingerprints, but no logs. ``report``,
``compare``, ``post`` and :func:`labkit.analysis.load` read it as they read the folder. ``--unpack
STUDY.zip DIR`` restores the folder, to continue the study. ``--with-sources`` adds the arms' own
classes and prompt files, so that ``labkit.replicate`` can repeat the study elsewhere. Exit codes: 0
on success; 2, with a one-line message, if the study or the file is not valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit import __version__, records
from labkit.cli.program_base import Program
from labkit.records import ARCHIVE_SUFFIX, RecordError

ENVIRONMENT = "environment.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Program(
        prog="python -m labkit.archive",
        description="Write a study as one file. With --unpack: write the folder of such a file.",
    )
    parser.add_argument("source", type=Path, metavar="DIR", help="the study's folder")
    parser.add_argument("target", type=Path, metavar="STUDY.zip", help="the file to write")
    parser.add_argument(
        "--unpack",
        action="store_true",
        help="unpack an archive instead: --unpack STUDY.zip DIR, where DIR does not exist",
    )
    help_text = "add the sources of your own classes, and the prompt files, as they were measured"
    parser.add_argument("--with-sources", action="store_true", help=help_text)

    def body(options: argparse.Namespace) -> None:
        source, target, sources = options.source, options.target, options.with_sources
        if options.unpack and sources:
            parser.error("--with-sources is for writing an archive, not for --unpack")
        if source.is_file() and not options.unpack:
            parser.error(f"{source} is a file; to unpack it, write --unpack {source} {target}")
        if options.unpack:
            records.unpack_archive(source, target)
            print(f"{source} unpacked into {target}")
        else:
            print(archive_study(source, target, with_sources=sources))

    return parser.run(argv, body, refused=(RecordError,))


def archive_study(study: Path, target: Path, *, with_sources: bool = False) -> str:
    """Write a study's folder as an archive; return a line on what it holds, with its SHA-256.

    ``with_sources``: with own classes and prompts.

    Raises ``RecordError`` if a record is not valid or was edited; a process is working on a cell;
    the folder holds a link; a source or prompt has changed since; or ``target`` does not end with
    ``.zip``, or exists and is not an archive of this study. Raises ``OSError`` if the file cannot
    be written.
    """
    from labkit.analysis.pages.report_files import PAGES
    from labkit.analysis.studies.data_frames import STORED_RUNS, store_runs
    from labkit.analysis.studies.study_discovery import cell_dirs
    from labkit.config import count_text

    cells = [path for path in cell_dirs(study) if isinstance(path, Path)]
    _check_target(target, cells)
    if cells == [study]:
        raise RecordError(f"{study} is one cell; archive its study, {study.parent}")
    for cell in cells:
        if records.is_locked(cell):
            raise RecordError(
                f"{cell}: a process is working on this cell; archive the study when it has ended"
            )
        if (cell / "cell.json").is_file():
            records.read_cell(cell)  # what cannot be read is not archived
    # A cell's own page is as large as its records, and labkit.report writes it from them.
    runs, left_out = store_runs(study), {PAGES, *(cell.name for cell in cells)}
    files = {
        name: path.read_bytes()
        for name, path in records.regular_files(study)
        if name.partition("/")[0] not in left_out and path.resolve() != target.resolve()
    }
    if with_sources:
        files |= _sources(cells)
    files |= {STORED_RUNS: runs, ENVIRONMENT: _environments(cells)}
    digest = records.write_archive(target, files, {cell.name: cell for cell in cells})
    count = count_text(sum(len(records.record_paths(cell)) for cell in cells), "run")
    size = f"{target.stat().st_size / 1e6:,.2f} MB"
    return f"{target}: {count_text(len(cells), 'cell')}, {count}, {size}, SHA-256 {digest}"


def _check_target(target: Path, cells: Sequence[Path]) -> None:
    """Refuse a target that is no archive, or the archive of another study: it would be lost."""
    from labkit.analysis.studies.study_discovery import shares_a_record

    if target.suffix != ARCHIVE_SUFFIX:
        raise RecordError(f"{target}: the name of an archive must end with {ARCHIVE_SUFFIX}")
    if target.is_dir():
        raise RecordError(f"{target} is a directory")
    if target.exists():
        try:
            old = records.open_study(target)
        except RecordError:
            raise RecordError(f"{target} exists and is not a study archive") from None
        if not shares_a_record(old, {cell.name: cell for cell in cells}):
            raise RecordError(f"{target} holds another study; choose another name, or remove it")


def _sources(cells: Sequence[Path]) -> dict[str, bytes]:
    """Return the own classes and prompts of all arms, checked against the arms' digests."""
    from labkit.experiment.compose import input_digests

    found: dict[str, bytes] = {}
    for cell in cells:
        for arm in records.read_arms(cell):
            now = input_digests.input_digests(arm.config, arm.environment)
            now = input_digests.named_as_begun(arm, now)
            if lost := sorted(filter(input_digests.is_archived, arm.inputs.keys() - now.keys())):
                raise RecordError(
                    f"{cell / 'arms' / arm.name}.json: no file of {lost[0]} here; start the "
                    "command in the folder of the study's, or archive without --with-sources"
                )
            changed = [name for name in now if arm.inputs.get(name, now[name]) != now[name]]
            if changed:
                raise RecordError(
                    f"{cell / 'arms' / arm.name}.json: the file of {changed[0]} has changed since "
                    "the study; restore it, or archive without --with-sources"
                )
            for name, path in input_digests.archived_files(arm).items():
                content = path.read_bytes()
                if found.setdefault(name, content) != content:
                    raise RecordError(
                        f"{path}: another arm has another file as {name}; archive without "
                        "--with-sources"
                    )
    return found


def _environments(cells: Sequence[Path]) -> bytes:
    """Return JSON with the machine's fingerprint from the first record of each cell."""
    fingerprints = {}
    for cell in cells:
        first = min(records.record_paths(cell), key=lambda path: path.name, default=None)
        record = {} if first is None else records.read_json(first)
        fingerprints[cell.name] = record.get("environment", {})
    body = {"schema_version": records.SCHEMA_VERSION, "labkit": __version__, "cells": fingerprints}
    return (json.dumps(body, indent=2) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
