"""labkit's server with a delay planted into the steps of its engine.

    python benchmarks/planted_server.py 0.03 engine=paged model=tiny server.port=8080

The first argument is the delay as a share of a step's CPU time. The others are those of
``python -m labkit.serve``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from labkit.engine.engine_protocol import TokenEvent
    from labkit.engine.llm_engine import LLMEngine

SERVER = "--server"


def main(share: str, overrides: Sequence[str]) -> int:
    """Check the overrides, and replace this process with the server's; see ``labkit.serve``."""
    from labkit import serve

    execve = os.execve

    def become(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
        execve(program, [program, __file__, share, SERVER, command[-1]], environment)

    os.execve = become  # type: ignore[assignment]
    return serve.main(overrides)


def serve(share: float, descriptor: str) -> int:
    """Run the server, whose config is read from a file descriptor; see ``labkit.server``."""
    from labkit.server.__main__ import main as run_server

    plant(share)
    sys.argv = ["labkit.server", descriptor]
    return run_server()


def plant(share: float) -> None:
    """Make each step of the engine slower, before its tokens reach the thread that writes them.

    Later, that thread would want the interpreter's lock, and wait for more than the delay.
    """
    from labkit.engine.llm_engine import LLMEngine

    step = LLMEngine.step

    def slower(self: LLMEngine) -> list[TokenEvent]:
        # The thread's own CPU time, because the server may be stopped during the step.
        start = time.thread_time()
        events = step(self)
        end = time.thread_time()
        while time.thread_time() < end + share * (end - start):
            pass
        return events

    LLMEngine.step = slower  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[2:3] == [SERVER]:
        status = serve(float(sys.argv[1]), sys.argv[3])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # as the real server does
    sys.exit(main(sys.argv[1], sys.argv[2:]))
