"""Error lines of the command-line programs: one line on standard error, exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{error_line(self.prog, f'{message}; --help')}\n")


def error_line(prog: str, error: object) -> str:
    """Return an error as one line: ``labkit.report: DIR: no such directory``."""
    return f"{prog.removeprefix('python -m ')}: {' '.join(str(error).split())}"


def print_error(prog: str, error: object) -> int:
    """Print an error to standard error and return exit code 2."""
    print(error_line(prog, error), file=sys.stderr)
    return 2


def print_notes(prog: str, notes: Iterable[str]) -> None:
    """Print notes to standard error, one line each."""
    for note in notes:
        print(error_line(prog, f"note: {note}"), file=sys.stderr)
