"""The check at load: does this architecture, paged and packed, compute what mlx_lm computes?

Two sequences are computed by the plain model with its own caches, and by labkit's
forward in uneven chunks over shuffled blocks, mixed with decodes; every token's logits
must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.base import EngineError
from labkit.engine.forward import Forward
from labkit.engine.input_builder import Batch
from labkit.engine.kv_pools import KVPools, LayerShape
from labkit.engine.layer_cache import ShapeRecorder
from labkit.engine.model_loader import LoadedModel, plain_caches
from labkit.engine.stats import Counters

if TYPE_CHECKING:
    from labkit.engine.attention.base import AttentionBackend

# Of the range of the logits. Float32 in another order of summation stays far below it.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plain model gives: the shapes it caches, and logits per sequence and token.

    ``steps`` says how many tokens of each sequence the paged forward computes together.
    """

    shapes: tuple[LayerShape, ...]
    sequences: tuple[NDArray[np.int32], ...]
    logits: tuple[NDArray[np.float32], ...]
    steps: tuple[tuple[int, int], ...]


def expect(loaded: LoadedModel, block_size: int) -> Expected:
    """Ask the plain model, before anything in it is replaced."""
    shapes = cached_shapes(loaded)
    rng = np.random.default_rng(0)
    vocab = _logits(loaded.model, np.zeros(1, np.int32), plain_caches(loaded.model)).shape[-1]
    steps = step_lengths(block_size)
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    sequences = tuple(rng.integers(0, vocab, n, dtype=np.int32) for n in lengths)
    logits = tuple(_logits(loaded.model, ids, plain_caches(loaded.model)) for ids in sequences)
    return Expected(shapes, sequences, logits, steps)


def step_lengths(block_size: int) -> tuple[tuple[int, int], ...]:
    """Return each step's tokens of both sequences: chunked, mixed, ragged, two blocks long."""
    return ((block_size - 3, 0), (6, 1), (1, 4), (1, 1))


def cached_shapes(loaded: LoadedModel) -> tuple[LayerShape, ...]:
    """Return what each layer caches per token, seen by running one token.

    Raises
    ------
    EngineError
        A layer caches something else than keys and values of one head dimension each.
    """
    recorders = [ShapeRecorder() for _ in loaded.windows]
    _logits(loaded.model, np.zeros(1, np.int32), recorders)
    shapes = tuple(recorder.shape for recorder in recorders if recorder.shape is not None)
    if len(shapes) != len(recorders):
        raise EngineError(f"model_type={loaded.model_type}: a layer does not use its cache")
    return shapes


def _logits(model: Any, ids: NDArray[np.int32], caches: Any) -> NDArray[np.float32]:
    import mlx.core as mx

    logits = model(mx.array(ids[None]), cache=caches)[0]
    mx.eval(logits)
    return np.array(logits, np.float32)


def verify(
    loaded: LoadedModel,
    forward: Forward,
    backend: AttentionBackend,
    expected: Expected,
    block_size: int,
) -> float:
    """Compare; return the largest difference as a fraction of the range of the logits.

    Raises
    ------
    EngineError
        The architecture cannot be served this way, with the reason.
    """
    where = f"model_type={loaded.model_type} ({forward.name} forward)"
    pools = KVPools(expected.shapes, 2 * len(expected.sequences) + 1, block_size)
    worst = 0.0
    for batch, reference in _steps(expected):
        try:
            meta = backend.plan(
                block_tables=batch.block_tables,
                seq_lens=batch.seq_lens,
                cu_seqlens_q=batch.cu_seqlens_q,
                block_size=block_size,
                total_q=batch.total_q,
            )
            logits = forward(batch, meta, pools, backend, Counters())
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EngineError(f"{where}: refused by the self-test: {reason}") from error
        worst = max(worst, float(np.abs(logits - reference).max() / np.ptp(reference)))
    if not worst <= TOLERANCE:
        raise EngineError(
            f"{where}: refused by the self-test: its logits differ from plain mlx_lm's by "
            f"{worst:.1e} of their range, allowed are {TOLERANCE:.0e}"
        )
    return worst


def _steps(expected: Expected) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Yield the batches of the test with the logits that each must give."""
    done = [0] * len(expected.sequences)
    tables = np.array([[3, 1], [2, 4]], np.int32)
    for counts in expected.steps:
        active = [i for i, count in enumerate(counts) if count]
        spans = [(i, done[i], done[i] + counts[i]) for i in active]
        cu_seqlens_q = np.cumsum([0, *(stop - start for _, start, stop in spans)], dtype=np.int32)
        yield (
            Batch(
                tokens=np.concatenate([expected.sequences[i][a:b] for i, a, b in spans]),
                positions=np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans]),
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=np.array([b for _, _, b in spans], np.int32),
                block_tables=tables[active],
                logit_rows=np.arange(cu_seqlens_q[-1], dtype=np.int32),
                sampling=(),
                prefill_tokens=0,
            ),
            np.concatenate([expected.logits[i][a:b] for i, a, b in spans]),
        )
        for i, _, stop in spans:
            done[i] = stop
