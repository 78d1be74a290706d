"""Place a captured graph's buffers in one arena.

Buffers that are never in use at the same time share memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES


class Lifetime(NamedTuple):
    """The indices of the first and the last node that use a buffer."""

    first: int
    last: int


def lifetimes(buffers_of_nodes: Sequence[set[int]]) -> dict[int, Lifetime]:
    """Return the lifetime of every buffer, ordered by first use.

    ``buffers_of_nodes[i]`` contains the buffers that node ``i`` reads or writes.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node, buffers in enumerate(buffers_of_nodes):
        for buffer in sorted(buffers):
            first.setdefault(buffer, node)
            last[buffer] = node
    return {buffer: Lifetime(first[buffer], last[buffer]) for buffer in first}


def place_buffers(
    buffers: Mapping[int, Lifetime], num_bytes: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """Return the offset of every buffer in the arena, and the arena's size in bytes.

    A buffer reuses the memory of a buffer that is no longer in use and has the same size (rounded
    up to cache lines). If there is none, it is appended to the arena. Buffers that one node uses
    never overlap. For example, three buffers of 64 bytes, used by the nodes 0 to 1, 1 to 2 and 2 to
    3, get the offsets 0, 64 and 0.
    """
    free: list[tuple[int, int]] = []  # (size, offset)
    offsets: dict[int, int] = {}
    end = 0
    for node in range(1 + max((buffer.last for buffer in buffers.values()), default=-1)):
        for buffer in (b for b, lifetime in buffers.items() if lifetime.first == node):
            size = _rounded_up(num_bytes[buffer])
            place = next((place for place in free if place[0] == size), None)
            if place is None:
                offsets[buffer], end = end, end + size
            else:
                free.remove(place)
                offsets[buffer] = place[1]
        free += [
            (_rounded_up(num_bytes[buffer]), offsets[buffer])
            for buffer, lifetime in buffers.items()
            if lifetime.last == node
        ]
    return offsets, end


def _rounded_up(size: int) -> int:
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
