"""``python -m labkit.check package.module:Class``: check a class of your own.

The class is recognised by its methods: a resolver, an attention backend, a queue, an eviction
policy, an engine, a kind of workload or a source of prompts. Its checks run on a small model, in
seconds, and a failed check shows the traceback. Arguments ``key=value`` are overrides of the config
that the checks compose, such as ``model=smollm2``. Exit codes: 0 if every check passes, 1 if one
fails, 2 for a mistake in the command, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from labkit.cli.program_base import Program
from labkit.config import ConfigError, Experiment, is_class_path, require
from labkit.engine.user_classes import is_own_frame
from labkit.machine.exception_text import one_line_with_type

if TYPE_CHECKING:
    from labkit.conformance import Check, Compose


class _OverrideError(ConfigError):
    """The user's overrides are invalid: no fault of the class."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = str(__doc__).partition(": ")[2]
    parser = Program(prog="python -m labkit.check", description=description)
    parser.add_argument("path", metavar="package.module:Class", help="the class to check")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="options of the config")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the class is found in the working folder

    def body(options: argparse.Namespace) -> int:
        require(is_class_path(options.path), f"{options.path}: must be package.module:Class")
        for word in options.overrides:
            require("=" in word, f"{word}: not an override; write key=value")
        return _check(options.path, options.overrides)

    return parser.run(argv, body, refused=(ConfigError,))


def _check(path: str, overrides: Sequence[str]) -> int:
    try:
        own_class = _import(path)
    except ConfigError:
        raise
    except (Exception, SystemExit):  # else the exit code is that of the class
        print(f"{path} cannot be imported")
        traceback.print_exc(file=sys.stdout)
        return 1
    from labkit.conformance import CONTRACTS, contract_of

    contract = contract_of(own_class)
    if contract is None:
        kinds = "; ".join(f"{c.kind}: {', '.join(c.telling)}" for c in CONTRACTS)
        raise ConfigError(f"{path}: its methods fit none of the known kinds ({kinds})")
    print(f"checking {path} as: {contract.kind}")
    if lacking := contract.lacking(own_class):
        print(f"  FAIL  it has no method {', '.join(f'{m}()' for m in lacking)}")
        return 1
    passed = failed = 0
    shown: set[str] = set()
    for check in contract.checks(path, _composer(overrides)):
        failure = _failure(check, path)
        if failure is None:
            passed += 1
            print(f"  ok    {check.demand}", flush=True)
            continue
        failed += 1
        reason, details = failure
        print(f"  FAIL  {check.demand}: {reason}", flush=True)
        if details not in shown:
            shown.add(details)
            print(textwrap.indent(details, "        "), flush=True)
        if check.needed:
            print("  the remaining checks are skipped: they need this one to pass")
            break
    total = passed + failed
    print(f"{passed} of {total} check{'s' * (total != 1)} passed")
    return int(failed > 0)


def _failure(check: Check, path: str) -> tuple[str, str] | None:
    """Return None if a check passes, else the reason and a traceback, if the class raised one."""
    from labkit.conformance import ContractError

    try:
        check.run()
    except _OverrideError:
        raise
    except ContractError as error:
        return str(error), ""
    except (Exception, SystemExit) as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        lines = traceback.format_exception(root.with_traceback(_from_own_line(root, path)))
        return one_line_with_type(root), "".join(lines)
    return None


def _from_own_line(error: BaseException, path: str) -> TracebackType | None:
    """Return the traceback from the first frame in the class's own package on, else all of it."""
    step = error.__traceback__
    while step is not None:
        if is_own_frame(step.tb_frame, path):
            return step
        step = step.tb_next
    return error.__traceback__


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{path}: no module {error.name!r} on the Python path; "
                "start the command in its folder, or set PYTHONPATH"
            ) from None
        raise
    require(hasattr(imported, name), f"{path}: the module {module} has no {name}")
    return getattr(imported, name)


def _composer(overrides: Sequence[str]) -> Compose:
    from labkit.cli import multirun_composition
    from labkit.cli.hydra_arguments import read_override
    from labkit.experiment.hydra.hydra_composer import Composer

    multirun_composition.register()
    typed = [read_override(word) for word in overrides]

    def compose(own: Mapping[str, str]) -> Experiment:
        words = [*(f"{key}={value}" for key, value in own.items()), *typed]
        try:
            with multirun_composition.initialized():
                return Composer().compose(words)
        except ConfigError as error:
            raise _OverrideError(str(error)) from None

    return compose


if __name__ == "__main__":
    sys.exit(main())
