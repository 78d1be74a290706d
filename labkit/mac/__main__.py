"""``python -m labkit.mac``: run every step and bundle the results in one zip file.

Exit codes: 0 if every step passed, 1 if a step failed or files cannot be written, 2 without Metal,
130 after ctrl-C. The zip file is also written if steps failed or ctrl-C stopped the run.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.cli.program_base import Program, print_error, write_utf8
from labkit.mac import report_bundle
from labkit.mac.mac_steps import INTERRUPTED, PASSED, STEP_TIMEOUT_S, MacStep, all_steps, run_steps
from labkit.machine.facts import macos, memory_capacity

PROG = "python -m labkit.mac"


def main(
    argv: Sequence[str] = (),
    has_metal: Callable[[], bool] = macos.has_metal,
    make_steps: Callable[[Path, int], Sequence[MacStep]] = all_steps,
) -> int:
    """Run the steps, write their results below ``outputs/`` and return the exit code."""
    Program(prog=PROG, description="Run every step, and bundle the results.").parse_args(argv)
    if not has_metal():
        return print_error(PROG, "there is no Metal on this machine; make mac is for Apple silicon")
    return run_and_bundle(PROG, "mac", make_steps, STEP_TIMEOUT_S)


def run_and_bundle(
    prog: str, name: str, make_steps: Callable[[Path, int], Sequence[MacStep]], timeout_s: float
) -> int:
    """Run the steps, write their results to ``outputs/NAME-TIME`` and return the exit code.

    ``timeout_s`` is the time after which a step is stopped.
    """
    write_utf8()
    folder = Path("outputs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True)
        facts, installed = report_bundle.surroundings(), report_bundle.packages()
        steps = make_steps(folder, memory_capacity.this_machine().total)
        redactor = report_bundle.Redactor.for_this_computer()
        outcomes = run_steps(steps, folder, _show, timeout_s)
        path = report_bundle.write_bundle(folder, facts, installed, outcomes, redactor)
    except OSError as error:
        print_error(prog, error)
        return 1
    statuses = [outcome.status for outcome in outcomes]
    size_mb = path.stat().st_size / 1e6
    print(f"\n{statuses.count(PASSED)} of {len(statuses)} steps passed")
    print(
        f"{path} ({size_mb:.1f} MB): attach it to an issue; user names and home paths are removed"
    )
    if INTERRUPTED in statuses:
        return 130
    return 0 if set(statuses) == {PASSED} else 1


def _show(text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
