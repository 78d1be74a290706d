"""What the command-line doors share: a mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """A parser that says a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line."""
        self.exit(2, f"{error_line(self.prog, f'{message}; --help')}\n")


def error_line(prog: str, error: object) -> str:
    """Return a mistake as one line: ``labkit.report: DIR: no such directory``."""
    return f"{prog.removeprefix('python -m ')}: {' '.join(str(error).split())}"


def print_error(prog: str, error: object) -> int:
    """Print a mistake to standard error and give exit code 2."""
    print(error_line(prog, error), file=sys.stderr)
    return 2
