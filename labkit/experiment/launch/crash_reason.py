"""What the log of a dead process says about its death."""

from __future__ import annotations

import os
import re
from pathlib import Path

EMPTY_LOG = "its log is empty"
MAX_CRASH_LINES = 500
FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
NOT_OWN = (PACKAGE, f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen ")


def crash_reason(log: Path) -> str:
    """Return the line of a dead process's log that says most about its death.

    It is the last line or, after a fatal signal, the innermost Python frame outside labkit and the
    installed packages of the thread that died; of the main thread, which is the last, if a thread
    without Python frames died. For a log without lines it says so.
    """
    lines = last_lines(log, MAX_CRASH_LINES)
    dumps = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not dumps:
        return lines[-1] if lines else EMPTY_LOG
    dump = lines[dumps[-1] :]
    threads = [i for i, line in enumerate(dump) if line.endswith("(most recent call first):")]
    died = [i for i in threads if dump[i].startswith("Current thread ")] or threads[-1:] or [0]
    end = next((i for i in threads if i > died[0]), len(dump))
    frames = [match for line in dump[died[0] : end] if (match := FRAME.fullmatch(line))]
    own = [frame for frame in frames if not any(part in frame["file"] for part in NOT_OWN)]
    error = lines[dumps[-1]].removeprefix("Fatal Python error: ")
    if not frames:
        return error
    frame = (own or frames)[0]
    return f"{error} ({frame['file']}:{frame['line']}, in {frame['function']})"


def last_lines(log: Path, count: int = 10) -> list[str]:
    """Return the last lines of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
