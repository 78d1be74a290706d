"""MLX's ring between the ranks of one host, set up as ``mlx.launch`` does.

A rank's environment has ``MLX_RANK``, the rank's number, and ``MLX_HOSTFILE``, a JSON list with the
addresses at which each rank listens. ``mlx.launch`` itself is not used, because it would add a
process between the run and its ranks. That process reads the terminal, and does not handle the
death of the run or of a rank well.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HOST = "127.0.0.1"
# MLX's last rank connects first, and retries after a full second if its neighbour does not listen
# yet. So the last rank joins this much later than the others.
HEAD_START_S = 0.05


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's view of the ring: the number of ranks, and MLX's communication group."""

    size: int
    group: Any


def join_ring(rank: int, size: int) -> Ring:
    """Join the environment's ring with all ranks. MLX raises ``RuntimeError`` if it cannot."""
    import mlx.core as mx

    if rank == size - 1:
        time.sleep(HEAD_START_S)
    group = mx.distributed.init(strict=True, backend="ring")
    return Ring(group.size(), group)


def all_sum(x: NDArray[np.float32], group: Any) -> NDArray[np.float32]:
    """Return the sum of all ranks' arrays, which have the same shape.

    Every rank gets the same bits. With more than two ranks, the order of summation depends on the
    position in the array.
    """
    import mlx.core as mx

    total: Any = mx.distributed.all_sum(mx.array(x), group=group, stream=mx.cpu)
    mx.eval(total)
    return np.asarray(total)


@contextmanager
def reserved_hostfile(size: int) -> Iterator[Path]:
    """Yield a hostfile of ``size`` local addresses that are reserved until the context ends.

    The addresses are bound in this process without listening, so the system gives them to no other
    process. A rank can still bind its address, because MLX sets the same socket options
    (``SO_REUSEADDR``, ``SO_REUSEPORT``).
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(size)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((HOST, 0))
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump([[f"{HOST}:{one.getsockname()[1]}"] for one in sockets], file)
        file.flush()
        yield Path(file.name)
