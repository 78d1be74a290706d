"""Import users' classes in a separate process, so that a plan finds mistakes in them.

The parent never imports a user's engine, backend or resolver, because the import may start threads,
take memory or end the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from textwrap import dedent

from labkit.config import Experiment, require, user_classes
from labkit.experiment.cell_composer import ENVIRONMENT, ComposedCell

IMPORT_TIMEOUT_S = 120.0
CODE = dedent("""
    import json, sys
    from labkit.engine.user_classes import import_error
    for path in sys.argv[1:]:
        print("\\n" + json.dumps([path, import_error(path)]), flush=True)
""")


def check_imports(cells: Iterable[ComposedCell]) -> None:
    """Import the classes of every arm that runs in the study's own environment.

    Raises
    ------
    ConfigError
        A class cannot be imported. The message is one line with the arm, the option, the reason
        and the last traceback line in the user's code.
    """
    named = {
        path: f"arm {name}: {key}={path}"
        for cell in cells
        for name, experiment in cell.experiments.items()
        if ENVIRONMENT not in cell.experiment.ablation.arms.get(name, {})
        for key, path in _classes(experiment)
    }
    if not named:
        return
    errors = _import(list(named))
    for path, where in named.items():
        require(path in errors, f"{where}: importing it ended the process, or took too long")
        require(errors[path] is None, f"{where}: {errors[path]}")


def _classes(experiment: Experiment) -> Iterable[tuple[str, str]]:
    return user_classes(experiment.engine).items()


def _import(paths: Sequence[str]) -> dict[str, str | None]:
    """Return the error of each class's import, or None for a class that was imported.

    If an import ends the process, its class and all later classes are absent. If the imports take
    too long, the result is empty.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE, *paths],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}
    errors: dict[str, str | None] = {}
    for line in done.stdout.splitlines():
        try:
            path, error = json.loads(line)
        except (ValueError, TypeError):  # a line that the user's module printed
            continue
        errors[path] = error
    return errors
