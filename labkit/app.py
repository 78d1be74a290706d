"""The application ``python -m labkit``: a question, its arms and its workload become a study.

Exit codes: 0 if all cells ran and every gate held, 1 if a gate or a run failed, 2 for an error in
the command or the configuration, 130 if interrupted, 141 if nobody reads the output.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from labkit import __version__
from labkit.cli import print_only_flags, run_study
from labkit.cli.hydra_arguments import parse
from labkit.cli.multirun_composition import register
from labkit.cli.program_base import discard_output, flush_output, write_utf8
from labkit.cli.run_study import say
from labkit.config import ConfigError
from labkit.machine.exception_text import one_line

UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run ``python -m labkit`` (and the console script ``labkit``)."""
    write_utf8()
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        status = _run(words)
        flush_output()  # at exit, Python would print a traceback if nobody reads
        sys.exit(status)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
    except ConfigError as error:
        say(str(error))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(discard_output())
    except Exception as error:
        _exit_with(error, words)


def _run(words: Sequence[str]) -> int:
    if "--version" in words:
        print(f"labkit {__version__}")
        return 0
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where ``package.module:Class`` is found
    command = parse(words)
    if command.only_prints:
        print_only_flags.print_config(command)
        return 0
    register()
    return run_study.run(command)


def _exit_with(error: Exception, words: Sequence[str]) -> NoReturn:
    from labkit.experiment.hydra.hydra_error_text import explain_config_error

    if type(error).__module__.split(".")[0] in ("hydra", "omegaconf", "yaml", "antlr4"):
        say(explain_config_error(error, words))
        sys.exit(2)
    from labkit.engine.user_classes import UserClassError
    from labkit.experiment import StudyError

    if isinstance(error, UserClassError):
        say(f"{error}; python -m labkit.check {error.path} shows the traceback")
        sys.exit(2)
    if isinstance(error, OSError) and error.filename and error.errno in UNUSABLE:
        if _is_below_out(error, words):
            say(f"out: cannot use {error.filename} ({error.strerror}); set another folder, out=DIR")
        else:
            say(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    if isinstance(error, StudyError | OSError):
        say(one_line(error))
        sys.exit(1)
    if isinstance(error, ValueError) and type(error).__module__.startswith("labkit."):
        say(one_line(error))  # an unwritable cache, a BLAS that can't be built
        sys.exit(2)
    raise error


def _is_below_out(error: OSError, words: Sequence[str]) -> bool:
    """Return whether an error is about a file in the folder of the command's study."""
    with suppress(ConfigError, OSError):
        out = run_study.named_folder(parse(words)) or Path("outputs")
        return Path(error.filename).absolute().is_relative_to(out.absolute())
    return False
