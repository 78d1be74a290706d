"""Token counters of a BatchGenerator, derived from the responses that the generator returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.engine.engine_protocol import Counters


class BatchGeneratorCounters:
    """Counters of the useful and wasted tokens of the calls of ``BatchGenerator.next``.

    - ``tokens.prefill``: prompt tokens computed.
    - ``tokens.padded``: padding computed in prefill, where the prompts of a batch are padded to
      the longest prompt chunk.
    - ``tokens.decode``: rows of decode forwards.
    - ``tokens.discarded``: decode rows computed ahead for requests that had already ended.
    - ``tokens.output``: output tokens returned to requests.
    - ``kv.padded_slots``: left padding in the KV cache that decode forwards attended to, summed
      over forwards.

    ``counters``: the engine's counters, to which the class adds. ``kv_bytes_by_window``: maps each
    sliding window (tokens, or None for no window) to one token's KV bytes, summed over the layers
    with that window.
    """

    def __init__(self, counters: Counters, kv_bytes_by_window: Mapping[int | None, int]) -> None:
        self._counters = counters
        self._kv_bytes_by_window = dict(kv_bytes_by_window)
        self._cached: dict[int, int] = {}  # tokens in the KV cache, by uid

    def add_request(self, uid: int) -> None:
        self._cached[uid] = 0

    def remove_request(self, uid: int) -> None:
        del self._cached[uid]

    def used_kv_bytes(self) -> int:
        """Return the KV bytes of the live requests' tokens that are inside each layer's window."""
        return sum(
            size * (length if window is None else min(length, window))
            for window, size in self._kv_bytes_by_window.items()
            for length in self._cached.values()
        )

    def count_call(self, prompt_responses: Sequence[Any], token_responses: Sequence[Any]) -> None:
        """Count one call of ``BatchGenerator.next`` from the responses that the call returned."""
        cached = self._cached
        cached_tokens = []
        for response in token_responses:
            cached[response.uid] += 1
            cached_tokens.append(cached[response.uid])
        chunks, num_last_tokens = [], 0
        for response in prompt_responses:
            computed = response.progress[0]
            if response.end_of_prompt:  # the prompt's last token is computed by a decode forward
                num_last_tokens += 1
            else:
                chunks.append(computed - cached[response.uid])
            cached[response.uid] = computed
        prefill, padded = sum(chunks) + num_last_tokens, _num_padding(chunks)
        ended = sum(response.finish_reason is not None for response in token_responses)
        self._counters.add_all(
            {
                "tokens.prefill": prefill,
                "tokens.padded": padded,
                "tokens.decode": len(token_responses),
                "tokens.discarded": ended,
                "tokens.computed": prefill + padded + len(token_responses),
                "tokens.output": len(token_responses),
                "kv.padded_slots": _num_padding(cached_tokens),
            }
        )


def _num_padding(lengths: Sequence[int]) -> int:
    return max(lengths) * len(lengths) - sum(lengths) if lengths else 0
