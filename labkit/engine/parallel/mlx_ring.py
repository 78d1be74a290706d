"""MLX's ring between the ranks of one host, by the contract of ``mlx.launch``.

A rank finds ``MLX_RANK`` and ``MLX_HOSTFILE`` in its environment: its number, and a JSON list
with the addresses at which each rank listens. ``mlx.launch`` itself is not used: it is a process
of its own between the run and its ranks, which reads the terminal and outlives neither well.
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
# MLX's last rank connects first, and waits a second where nobody listens yet.
HEAD_START_S = 0.05


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring as one rank sees it; ``group`` is MLX's."""

    size: int
    group: Any


def join_ring(rank: int, size: int) -> Ring:
    """Join the ring that the environment names, as its ``rank``; waits until all ranks have.

    Raises
    ------
    RuntimeError
        MLX's: a neighbour cannot be reached, or an address cannot be listened at.
    """
    import mlx.core as mx

    if rank == size - 1:
        time.sleep(HEAD_START_S)
    group = mx.distributed.init(strict=True, backend="ring")
    return Ring(group.size(), group)


def all_sum(x: NDArray[np.float32], group: Any) -> NDArray[np.float32]:
    """Return the sum over the ranks of arrays of one shape, the same bits in every rank.

    Of two ranks' numbers there is one order of summation; of more, it depends on where in the
    array a number stands.
    """
    import mlx.core as mx

    total: Any = mx.distributed.all_sum(mx.array(x), group=group, stream=mx.cpu)
    mx.eval(total)
    return np.asarray(total)


@contextmanager
def reserved_hostfile(size: int) -> Iterator[Path]:
    """Yield a hostfile of ``size`` free addresses, which are nobody else's until the end.

    They are bound here without listening, so that the system gives them to no other process;
    a rank may bind them too, as MLX asks to share them.
    """
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(size)]
        for each in bound:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind((HOST, 0))
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump([[f"{HOST}:{each.getsockname()[1]}"] for each in bound], file)
        file.flush()
        yield Path(file.name)
