"""The frame of the command-line programs: arguments, one line for an error, the exit status."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

PIPE_CLOSED = 128 + signal.SIGPIPE


class Program(argparse.ArgumentParser):
    """A program's arguments, and the frame in which it runs. Its errors are one line each."""

    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage, and exit with code 2."""
        self.exit(2, f"{error_line(self.prog, f'{message}; --help')}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after ``--help`` or an error of the arguments."""
        try:
            flush_output()
        except BrokenPipeError:
            status = discard_output()
        super().exit(status, message)

    def run(
        self,
        argv: Sequence[str] | None,
        body: Callable[[Any], int | None],
        *,
        refused: Sequence[type[Exception]] = (),
        failed: Sequence[type[Exception]] = (),
        failed_status: int = 1,
    ) -> int:
        """Parse the arguments, call ``body`` with them and return the exit status.

        The status is what ``body`` returns (None: 0), 2 for an exception in ``refused``,
        ``failed_status`` for one in ``failed``, 130 after ctrl-C, 141 if the output's pipe is
        closed: the shell's status of a program that SIGPIPE ended, and no verdict.
        A file that cannot be read or written is named; that is 2 unless ``failed`` has ``OSError``.
        """
        write_utf8()
        options = self.parse_intermixed_args(argv)
        expected: tuple[type[Exception], ...] = (OSError, *failed, *refused)
        try:
            status = body(options) or 0
            flush_output()
            return status
        except BrokenPipeError:
            return discard_output()
        except expected as error:
            if isinstance(error, OSError) and error.filename:
                print_error(self.prog, f"{error.filename}: {error.strerror}")
            else:
                print_error(self.prog, error)
            return failed_status if isinstance(error, tuple(failed)) else 2
        except KeyboardInterrupt:
            return 130


def user_path(text: str) -> Path:
    """Return a path of the command line; the shell leaves the ``~`` of ``--out=~/FOLDER``."""
    return Path(os.path.expanduser(text))


def flush_output() -> None:
    """Flush standard output, which is None if the shell closed it (``>&-``)."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_output() -> int:
    """Discard the standard output that nobody reads, and return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def write_utf8() -> None:
    """Write standard output and error as UTF-8, for other encodings lack the minus of tables.

    If the shell closed standard error (``2>&-``), what is written to it is lost: ``print`` would
    write it to standard output.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=stream.errors)


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
