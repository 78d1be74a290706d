"""Result files, recognised by their content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.importers import (
    csv_table,
    guidellm_aiperf,
    llama_cpp,
    micro_benchmarks,
    process_timers,
    vllm_sglang_bench,
)
from labkit.importers.imported_run import ImportedRun, ResultFileError
from labkit.machine.exception_text import one_line_with_type

FORMATS = (
    *vllm_sglang_bench.FORMATS,
    *guidellm_aiperf.FORMATS,
    *llama_cpp.FORMATS,
    *process_timers.FORMATS,
    *micro_benchmarks.FORMATS,
    *csv_table.FORMATS,
)

MAX_DIGITS = 300  # of an integer that is used as a float


def read_files(files: Sequence[Path]) -> list[ImportedRun]:
    """Return the runs of files, in their order. A folder stands for its files.

    Raises
    ------
    ResultFileError
        A file is not of a known tool, its content is not as the tool writes it, or it is named
        twice.
    OSError
        A file cannot be read.
    """
    runs: list[ImportedRun] = []
    read = set[Path]()
    for file in files:
        found = _visible_files(file) if file.is_dir() else [file]
        for one in found:
            if one in read:
                raise ResultFileError(f"{one}: it is named twice")
            read.add(one)
            runs += _read_file(one)
    if not runs:
        raise ResultFileError(f"{', '.join(map(str, files))}: there are no files")
    return runs


def _visible_files(folder: Path) -> list[Path]:
    """Return a folder's files without hidden ones, which file managers leave (``.DS_Store``)."""
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def _read_file(file: Path) -> list[ImportedRun]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ResultFileError(f"{file}: it is not a text file") from None
    if not text.strip():
        raise ResultFileError(f"{file}: it is empty")
    document = _document(text, file)
    known = next((one for one in FORMATS if one.recognises(document)), None)
    if known is None:
        tools = ", ".join(one.tool for one in FORMATS)
        raise ResultFileError(f"{file}: it is not a result of a tool that labkit reads ({tools})")
    try:
        return list(known.read(document, file))
    except (TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ResultFileError(
            f"{file}: it is not as {known.tool} writes it ({one_line_with_type(error)})"
        ) from None


def _document(text: str, file: Path) -> Any:
    """Return a file's JSON, the list of its JSON lines, or its text if it is neither."""
    if not text.lstrip().startswith(("{", "[", "#")):
        return text
    try:
        document = json.loads(text, parse_int=_integer)
        return document if document != [] else text
    except json.JSONDecodeError as error:
        whole = error
    except RecursionError:
        raise ResultFileError(f"{file}: its JSON is nested too deeply") from None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return text
    try:
        return [json.loads(line, parse_int=_integer) for line in lines]
    except RecursionError:
        raise ResultFileError(f"{file}: its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        # A file of one object that was cut fails on its last line as a whole.
        one = whole if whole.lineno > 1 or len(lines) == 1 else error
        raise ResultFileError(f"{file}: its JSON is cut or not valid: {one}") from None


def _integer(digits: str) -> float:
    """Return an integer of a file; infinity, which no field takes, if no float can hold it."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)
