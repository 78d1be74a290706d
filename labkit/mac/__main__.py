"""``python -m labkit.mac``: run every step, and leave one file.

Exit codes: 0 where every step passed, 1 where one failed, 2 where there is no Metal, 130
after ctrl-C. The file is written in every case but the third.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.cli_errors import print_error
from labkit.mac import report_bundle
from labkit.mac.mac_steps import INTERRUPTED, PASSED, MacStep, all_steps, run_steps
from labkit.machine import macos, memory_profile

PROG = "python -m labkit.mac"


def main(
    has_metal: Callable[[], bool] = macos.has_metal,
    make_steps: Callable[[Path, int], Sequence[MacStep]] = all_steps,
) -> int:
    """Run the steps below ``outputs/`` and return the exit code."""
    if not has_metal():
        return print_error(PROG, "there is no Metal on this machine; make mac is for Apple silicon")
    folder = Path("outputs") / f"mac-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True)
        facts = report_bundle.surroundings()
        steps = make_steps(folder, memory_profile.this_machine().total)
        outcomes = run_steps(steps, folder, _show)
        path = report_bundle.write_bundle(
            folder, facts, outcomes, report_bundle.Redactor.of_this_computer()
        )
    except OSError as error:
        print_error(PROG, error)
        return 1
    words = [outcome.word for outcome in outcomes]
    size = path.stat().st_size / 1e6
    print(f"\n{words.count(PASSED)} of {len(words)} steps passed")
    print(
        f"{path} ({size:.1f} MB): attach it to an issue; it holds no user's name and no home path"
    )
    if INTERRUPTED in words:
        return 130
    return 0 if set(words) == {PASSED} else 1


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
