"""Import users' classes in a separate process, so that a plan finds mistakes in them.

The parent never imports a user's engine, backend or resolver, because the import may start threads,
take memory or end the process. The parent needs a user's kind of workload, and imports it
after a child has done so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from textwrap import dedent
from typing import TYPE_CHECKING

from labkit.config import Experiment, is_class_path, require, user_classes

if TYPE_CHECKING:
    from labkit.experiment.compose.cell_composer import ComposedCell

IMPORT_TIMEOUT_S = 120.0
ENDED = "importing it ended the process, or took too long"
CODE = dedent("""
    import json, sys
    from labkit.engine.user_classes import import_error
    for path in sys.argv[1:]:
        print("\\n" + json.dumps([path, import_error(path)]), flush=True)
""")


def check_imports(cells: Iterable[ComposedCell]) -> None:
    """Import, in a child process, users' classes of arms that run in the study's environment.

    Raises ``ConfigError`` if a class cannot be imported, or the child ended or took longer than
    ``IMPORT_TIMEOUT_S``.
    """
    from labkit.experiment.compose.cell_composer import ENVIRONMENT

    named = {
        path: f"arm {name}: {key}={path}"
        for cell in cells
        for name, experiment in cell.experiments.items()
        if ENVIRONMENT not in cell.experiment.ablation.arms.get(name, {})
        for key, path in user_classes(experiment.engine).items()
    }
    if named:
        _require_imported(named, _import(list(named)))


def check_workload_class(experiment: Experiment) -> None:
    """Import the class that ``workload.kind`` names, if it does, in a child process.

    Raises ``ConfigError`` if it cannot be imported, or importing it ended the child.
    """
    path = experiment.workload.kind
    if is_class_path(path):
        error = _import_once(path, tuple(sys.path))
        _require_imported({path: f"workload.kind={path}"}, {path: error})


def _require_imported(named: Mapping[str, str], errors: Mapping[str, str | None]) -> None:
    for path, where in named.items():
        error = errors.get(path, ENDED)
        require(error is None, f"{where}: {error}")


@cache
def _import_once(path: str, folders: tuple[str, ...]) -> str | None:
    """Return the error of a class, or None; a process imports each class in one child only.

    ``folders``: the Python path. Another one may have another class of this name.
    """
    return _import([path]).get(path, ENDED)


def _import(paths: Sequence[str]) -> dict[str, str | None]:
    """Return each class's error, or None; absent: an import before it, or its own, never ended."""
    # Where this process looks; without PYTHONSAFEPATH the working folder would precede it.
    inherited = os.environ.get("PYTHONPATH")
    folders = [*map(os.path.abspath, sys.path), *([inherited] if inherited else []), os.getcwd()]
    try:
        printed = subprocess.run(
            [sys.executable, "-c", CODE, *paths],
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(folders)},
            capture_output=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
    errors: dict[str, str | None] = {}
    for line in printed.splitlines():
        with suppress(ValueError, TypeError):  # a line that the user's module printed
            path, error = json.loads(line)
            errors[path] = error
    return errors
