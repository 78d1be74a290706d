"""Note which functions of labkit each test calls, in its own process and those it starts.

Python imports a module of this name at start-up where PYTHONPATH leads to it. ``CALLS`` is
the file to append to: a line for each function and test; pytest says which test is running.
"""

import os
import sys
import threading
from pathlib import Path

LABKIT = str(Path(__file__).resolve().parents[3] / "labkit") + os.sep


def noter(path):
    """Return a profile function that appends "file<TAB>function<TAB>test" to ``path``."""
    known, noted = {}, set()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        name = known.get(code)
        if name is None:
            ours = code.co_filename.startswith(LABKIT)
            name = f"{code.co_filename[len(LABKIT) :]}\t{code.co_qualname}" if ours else ""
            known[code] = name
        if name:
            line = f"{name}\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\n"
            if line not in noted:
                noted.add(line)
                os.write(file, line.encode())

    return note


if "CALLS" in os.environ:
    note = noter(os.environ["CALLS"])
    threading.setprofile(note)
    sys.setprofile(note)
