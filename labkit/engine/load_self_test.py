"""The check at load: does this architecture, paged and packed, compute what mlx_lm computes?

Two sequences are computed by the plain model with its own caches, and by labkit's
forward in uneven chunks over shuffled memory, mixed with decodes; every token's logits
must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.compute_dtype import MatrixStorage
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.input_builder import InputBuilder
from labkit.engine.kv_layout.kv_cache_manager import KVCache, KVCacheFactory, KVCacheManager
from labkit.engine.kv_layout.kv_shape import KVShape
from labkit.engine.layer_cache import ShapeRecorder
from labkit.engine.model_loader import LoadedModel, plain_caches
from labkit.engine.packed_forward import PackedForward
from labkit.engine.request import Request, RequestState
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput
from labkit.machine.exception_text import one_line

# Of the range of the logits, by the type computed in. Another order of summation stays below it
# (the worst of 46 architectures: 5e-3 in float16, 2e-2 in bfloat16); a wrong position does not.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True, slots=True)
class ExpectedLogits:
    """What the plain model gives: the shapes it caches, and logits per sequence and token.

    ``dtype``: the type of the keys that it caches, in MLX's words. ``steps`` says how many
    tokens of each sequence labkit's forward computes together.
    """

    shapes: tuple[KVShape, ...]
    dtype: str
    sequences: tuple[NDArray[np.int32], ...]
    logits: tuple[NDArray[np.float32], ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.sequences))

    def layout(self, kind: KVCacheFactory) -> KVCache:
        """Make a layout just large enough for the sequences."""
        return kind.create_for(self.shapes, len(self.sequences), self.max_sequence_tokens)


def compute_expected(loaded: LoadedModel, block_size: int) -> ExpectedLogits:
    """Ask the plain model, before anything in it is replaced.

    What it keeps in less than float32 is widened for it, layer by layer.

    Raises
    ------
    EngineError
        It cannot be asked: what a layer caches, or what mlx_lm itself says.
    """
    try:
        return _expect(loaded, block_size)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, EngineError):
            raise
        reason = one_line(error)
        raise EngineError(f"model_type={loaded.model_type}: plain mlx_lm fails: {reason}") from None


def _expect(loaded: LoadedModel, block_size: int) -> ExpectedLogits:
    from labkit.engine.dequantized_layers import dequantized_on_use, numpy_product

    model, kept = loaded.model, loaded.matrices is MatrixStorage.as_stored
    with dequantized_on_use(model) if kept else nullcontext():
        shapes, dtype = kv_shapes(loaded)
        one = _lazy_logits(model, np.zeros((1, 1), np.int32), plain_caches(model))
    rng, vocab = np.random.default_rng(0), one.shape[-1]
    steps = step_lengths(block_size)
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    sequences = tuple(rng.integers(0, vocab, n, dtype=np.int32) for n in lengths)
    with dequantized_on_use(model, numpy_product) if kept else nullcontext():
        logits = _all_logits(model, sequences)
    return ExpectedLogits(shapes, dtype, sequences, logits, steps)


def step_lengths(block_size: int) -> tuple[tuple[int, int], ...]:
    """Return each step's tokens of both sequences: chunked, mixed, ragged, two blocks long.

    Two decodes end them: what the first leaves behind (a graph) the second finds.
    """
    return ((block_size - 3, 0), (6, 1), (1, 4), (1, 1), (1, 1))


def kv_shapes(loaded: LoadedModel) -> tuple[tuple[KVShape, ...], str]:
    """Return what each layer caches per token, and in which type, seen by running one token.

    Raises
    ------
    EngineError
        A layer caches something else than keys and values of one head dimension each.
    """
    recorders = [ShapeRecorder() for _ in loaded.windows]
    _lazy_logits(loaded.model, np.zeros((1, 1), np.int32), recorders)
    shapes = tuple(recorder.shape for recorder in recorders if recorder.shape is not None)
    if len(shapes) != len(recorders):
        raise EngineError(f"model_type={loaded.model_type}: a layer does not use its cache")
    return shapes, recorders[0].dtype


def _lazy_logits(model: Any, ids: NDArray[np.int32], caches: Any) -> Any:
    """Return logits [sequences, tokens, vocabulary] that nothing has computed yet."""
    import mlx.core as mx

    return model(mx.array(ids), cache=caches).astype(mx.float32)


def _all_logits(
    model: Any, sequences: tuple[NDArray[np.int32], ...]
) -> tuple[NDArray[np.float32], ...]:
    """Compute the sequences at once, the shorter ones with zeros behind, which they never see."""
    import mlx.core as mx

    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    logits = _lazy_logits(model, ids, plain_caches(model))
    mx.eval(logits)
    rows = np.array(logits)
    return tuple(row[: len(ids)] for row, ids in zip(rows, sequences, strict=True))


def verify(
    loaded: LoadedModel,
    forward: PackedForward,
    layout: KVCache,
    expected: ExpectedLogits,
    kv_dtype: str = "float32",
) -> float:
    """Compare; return the largest difference as a fraction of the range of the logits.

    ``layout`` has room for one request of ``expected.max_sequence_tokens`` tokens per sequence, in
    ``kv_dtype``.

    Raises
    ------
    EngineError
        The architecture cannot be served this way, with the reason.
    """
    where = f"model_type={loaded.model_type} ({forward.name} forward)"
    differences = []
    try:
        for logits, reference in compute(forward, layout, expected, some_rows=True):
            differences.append(np.abs(logits - reference).max() / np.ptp(reference))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason = one_line(error)
        raise EngineError(f"{where}: refused by the self-test: {reason}") from error
    worst = float(np.max(differences))  # keeps a NaN, which Python's max may lose
    kind = max((expected.dtype, kv_dtype), key=lambda word: TOLERANCE[word])
    if not worst <= TOLERANCE[kind]:
        raise EngineError(
            f"{where}: refused by the self-test: its logits differ from plain mlx_lm's by "
            f"{worst:.1e} of their range, allowed are {TOLERANCE[kind]:.0e} in {kind}"
        )
    return worst


def compute(
    forward: PackedForward, layout: KVCache, expected: ExpectedLogits, *, some_rows: bool = False
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield every step's logits, a row per token, with those expected.

    ``some_rows``: of the first step only every other row, as serving asks for some.
    """
    for index, (batch, reference) in enumerate(_steps(expected, layout.cache)):
        if some_rows and index == 0:
            batch, reference = batch._replace(logit_rows=batch.logit_rows[::2]), reference[::2]
        computed, step = layout.memory.plan(batch)
        yield np.asarray(forward(computed, step, Counters())), reference


def require_batch_invariance(
    options: config.Engine, forward: PackedForward, kind: KVCacheFactory, expected: ExpectedLogits
) -> None:
    """Check ``engine.batch_invariant``: the same bits, whatever the batch.

    A row's logits must not depend on the rows beside it, on how its prompt is cut into chunks,
    or on the step in which it is computed. That holds where every operation gives each row
    through one tile and one order of summation (design.md, "On the CPU"). The config refuses
    what is known not to; what depends on the model is seen here: the self-test's sequences are
    computed alone and whole, then chunked beside each other.

    Raises
    ------
    EngineError
        The two differ in a bit, or the forward's BLAS is known to make them differ.
    """
    if forward.name == "mlx" and options.blas is config.Blas.openblas:
        raise EngineError(
            "engine.batch_invariant=true: this model runs on MLX, whose OpenBLAS products change "
            "with the number of rows; set engine.blas=stock, or leave it false"
        )
    first, second = map(len, expected.sequences)
    whole = replace(expected, steps=((first, 0), (0, second)))
    logits = tuple(rows for rows, _ in compute(forward, expected.layout(kind), whole))
    for rows, reference in compute(
        forward, expected.layout(kind), replace(expected, logits=logits)
    ):
        if not np.array_equal(rows, reference):
            raise EngineError(
                "engine.batch_invariant=true: a token's logits change with the batch "
                f"({forward.name} forward); leave it false"
            )


def _steps(
    expected: ExpectedLogits, cache: KVCacheManager
) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Yield the batches of the test with the logits that each must give."""
    states = [
        RequestState(Request(f"self-test {i}", tuple(ids.tolist())))
        for i, ids in enumerate(expected.sequences)
    ]
    _shuffle(cache, len(states))
    for state in states:
        cache.reserve(state, state.num_tokens)
    builder = InputBuilder(cache)
    for counts in expected.steps:
        chunks = [
            ScheduledChunk(state, state.num_computed_tokens, count)
            for state, count in zip(states, counts, strict=True)
            if count
        ]
        batch = builder.build(SchedulerOutput(tuple(chunks)))
        spans = [
            logits[state.num_computed_tokens :][:count]
            for state, logits, count in zip(states, expected.logits, counts, strict=True)
        ]
        rows = np.arange(batch.total_q, dtype=np.int32)
        # A token of each is a step of decodes: what only those run is tested too.
        prefill = batch.prefill_tokens if max(counts) > 1 else 0
        batch = batch._replace(logit_rows=rows, prefill_tokens=prefill)
        yield batch, np.concatenate(spans)
        for chunk in chunks:
            chunk.state.num_computed_tokens += chunk.num_tokens


def _shuffle(cache: KVCacheManager, requests: int) -> None:
    """Make free memory lie out of order, as it does in use."""
    decoys = [RequestState(Request(f"decoy {i}", (0,))) for i in range(2 * requests)]
    for decoy in decoys:
        cache.reserve(decoy, 1)
    for decoy in decoys[::2] + decoys[-1::-2]:
        cache.release(decoy.request_id)
