"""KV blocks that units visit with and without a window, counted one key at a time."""

from types import SimpleNamespace

import numpy as np
import pytest

from labkit.engine.attention.launch_evidence import window_blocks


def blocks_of(past, length, rows, window, size):
    """Return the blocks that hold a key of a unit of a sequence, without and with the window."""
    whole, seen = 0, 0
    for first in range(0, length, rows):
        queries = range(past + first, past + min(first + rows, length))
        keys = {key for query in queries for key in range(query + 1)}
        near = {key for query in queries for key in range(max(0, query + 1 - window), query + 1)}
        whole += len({key // size for key in keys})
        seen += len({key // size for key in near})
    return whole, seen


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_blocks_are_those_that_hold_a_key_in_the_window(rows, window):
    draw = np.random.default_rng(rows * window)
    for size in (1, 4, 16):
        lengths = draw.integers(1, 20, 6)
        past = draw.integers(0, 40, 6)
        metadata = SimpleNamespace(
            cu_seqlens_q=np.concatenate([[0], np.cumsum(lengths)]),
            seq_lens=past + lengths,
            num_seqs=6,
            block_size=size,
        )
        counted = [
            blocks_of(before, length, rows, window, size)
            for before, length in zip(past.tolist(), lengths.tolist(), strict=True)
        ]
        expected = tuple(map(sum, zip(*counted, strict=True)))
        assert window_blocks(metadata, rows, window) == expected
