"""What a BatchGenerator computes, told from what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.engine.engine_protocol import Counters


class BatchGeneratorCounters:
    """Tokens computed for something and for nothing, per call of ``BatchGenerator.next``.

    ``tokens.prefill``: prompt tokens. ``tokens.padded``: positions computed in prefill
    beside them, since all prompts of a chunk are padded to the longest. ``tokens.decode``:
    rows of decode forwards. ``tokens.discarded``: those among them that were computed
    ahead for a request that had ended. ``kv.padded_slots``: left-padding in the KV cache
    that the decode forwards attended to, summed over forwards.

    ``slot_bytes``: KV bytes of one token, by the sliding window of the layers.
    """

    def __init__(self, counters: Counters, slot_bytes: Mapping[int | None, int]) -> None:
        self._counters = counters
        self._slot_bytes = dict(slot_bytes)
        self._cached: dict[int, int] = {}  # KV slots in use, by uid

    def begin(self, uid: int) -> None:
        """Take note of an inserted request."""
        self._cached[uid] = 0

    def end(self, uid: int) -> None:
        """Forget a request."""
        del self._cached[uid]

    def used_bytes(self) -> int:
        """Return the bytes of keys and values that live requests have computed and still need."""
        return sum(
            size * (length if window is None else min(length, window))
            for window, size in self._slot_bytes.items()
            for length in self._cached.values()
        )

    def count(self, prompts: Sequence[Any], tokens: Sequence[Any]) -> None:
        """Count one call by its prompt responses and its generation responses."""
        cached = self._cached
        slots = []
        for response in tokens:
            cached[response.uid] += 1
            slots.append(cached[response.uid])
        chunks, last = [], 0
        for response in prompts:
            done = response.progress[0]
            if response.end_of_prompt:  # its last token, in a decode forward of its own
                last += 1
            else:
                chunks.append(done - cached[response.uid])
            cached[response.uid] = done
        prefill, padded = sum(chunks) + last, num_padding(chunks)
        ended = sum(response.finish_reason is not None for response in tokens)
        self._counters.add_all(
            {
                "tokens.prefill": prefill,
                "tokens.padded": padded,
                "tokens.decode": len(tokens),
                "tokens.discarded": ended,
                "tokens.computed": prefill + padded + len(tokens),
                "tokens.sampled": len(tokens),
                "kv.padded_slots": num_padding(slots),
            }
        )


def num_padding(lengths: Sequence[int]) -> int:
    """Return what padding every length to the longest adds."""
    return max(lengths) * len(lengths) - sum(lengths) if lengths else 0
