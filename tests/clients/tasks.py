"""What every client's script uses: the server's address, and the tasks' results as lines of JSON.

The scripts run in the clients' own environments, in which labkit is not installed.
"""

import asyncio
import functools
import inspect
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

URL = os.environ["SERVER_URL"]  # without /v1
MODEL = os.environ["SERVER_MODEL"]
TOKENIZER = os.environ["TOKENIZER"]  # the model's folder
MAX_TOKENS = 64
CITIES = ("Paris", "Rome")
TOOL_RESULT = "It is sunny."


@functools.cache
def event_loop():
    """Return the one event loop of all tasks, because clients keep connections."""
    return asyncio.Runner()


def task(name):
    """Return a decorator that runs a function at once and prints whether it succeeded."""

    def run(function):
        result = {"task": name}
        try:
            done = function()
            if inspect.iscoroutine(done):
                event_loop().run(done)
        except Exception as error:
            traceback.print_exc()
            result["error"] = f"{type(error).__name__}: {error}"
        print("\n" + json.dumps(result), flush=True)
        return function

    return run


def command(name, *arguments):
    """Run a command of the client's environment; its output goes to the log."""
    program = Path(sys.executable).with_name(name)
    ended = subprocess.run([str(program), *arguments], stdout=sys.stderr)
    check(not ended.returncode, f"{name} ended with {ended.returncode}")


def check(condition, message):
    """Raise an error with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def argument(default):
    """Return the script's argument, which selects an API where a client has several."""
    return sys.argv[1] if len(sys.argv) > 1 else default
