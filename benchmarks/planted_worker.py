"""The worker, with a delay planted into the turns of arms whose names begin with ``planted``.

``planted_1pct`` is 1 % slower: inside the launch where kernels are timed, inside the engine's
step where requests are served. Everything else is the real worker's.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.experiment import worker
from labkit.experiment.in_process import Process
from labkit.records import read_arm


class Planted:
    """How much slower the arm is whose turn it is."""

    share = 0.0

    def slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which takes longer by the share of the arm whose turn it is."""

        def slower(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            end = time.perf_counter()
            until = end + self.share * (end - start)
            while time.perf_counter() < until:
                pass
            return result

        return slower


def plant() -> None:
    """Plant the delay into the operations that are timed."""
    from labkit.engine.attention.cpu import CpuBackend
    from labkit.engine.engine import PagedEngine

    planted, turn = Planted(), Process._turn

    @contextmanager
    def known(self: Process, arm: int) -> Any:
        asked = re.match(r"planted_([\d.]+)pct", self.members[arm].arm.name)
        with turn(self, arm):
            planted.share = float(asked[1]) / 100 if asked else 0.0
            yield
            planted.share = 0.0

    Process._turn = known  # type: ignore[method-assign]
    kernels = read_arm(Path(sys.argv[1])).config["workload"]["kind"] == "kernel"
    owner, name = (CpuBackend, "forward") if kernels else (PagedEngine, "step")
    setattr(owner, name, planted.slow(getattr(owner, name)))


if __name__ == "__main__":
    if "--prepare" not in sys.argv:
        plant()
    status = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as the worker does
