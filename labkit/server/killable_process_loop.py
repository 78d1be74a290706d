"""The loop of a process of :mod:`labkit.server.killable_process_pool`.

Standard input has a task per line, as JSON, and standard output a line for each answer. The first
line of output, null, is written when the process is ready. The process ends when its input ends or
when its parent dies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from labkit.machine.processes import parent_death


def answer_tasks(prepare: Callable[[Mapping[str, Any]], Callable[[Any], Any]]) -> int:
    """Answer each line of standard input until it ends, and return the exit code.

    ``prepare`` gets the process's setup and returns the function that answers a task.
    """
    setup = json.loads(sys.argv[1])
    parent_death.watch_parent(
        setup["parent"], None, started_by_main_thread=setup["started_by_main_thread"]
    )
    answer = prepare(setup)
    print("null", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
    return 0
