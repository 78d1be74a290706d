"""The self-test at load: labkit's forward must compute the logits of plain mlx_lm.

Two sequences are computed twice: by the plain model with mlx_lm's caches, and by labkit's forward
in uneven chunks, mixed with decodes, over blocks in shuffled order. The logits of every token must
agree within ``TOLERANCE``.
"""

from __future__ import annotations

import importlib.util
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.kv_cache_interface import KVCache, KVCacheFactory, KVCacheManager
from labkit.engine.model.cache_shapes import CacheShapes, cache_shapes
from labkit.engine.model.dtype_resolution import MatrixStorage
from labkit.engine.model.layer_cache import KVHandle
from labkit.engine.model.model_loader import LoadedModel, make_prompt_cache
from labkit.engine.request import Request, RequestState
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.runner.packed_forward import PackedForward
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput
from labkit.machine.exception_text import one_line
from labkit.machine.file_digest import file_state
from labkit.machine.numpy_blas_threads import single_thread

# The largest allowed difference as a fraction of the range of the logits, by the narrowest type of
# weights, activations, keys and values. A different order of summation stays below it (at most 5e-3
# in float16 and 2e-2 in bfloat16 over 46 architectures), and so do int8 activations (4e-2 with
# smollm2), while a wrong position exceeds it.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1.5e-1, "int4": 5e-1}


Sequences = tuple[NDArray[np.int32], ...]  # the token ids of each
Logits = tuple[NDArray[np.float32], ...]  # of each sequence: [tokens, vocabulary]
StoredLogits = Callable[[Sequences, Callable[[], Logits]], Logits]


@dataclass(frozen=True, slots=True)
class ExpectedLogits:
    """The test sequences, and the logits that the plain model computes for them."""

    cached: CacheShapes  # what the model's layers cache
    sequences: Sequences
    logits: Logits
    # For each step of labkit's forward, the number of tokens of each sequence that it computes
    steps: tuple[tuple[int, int], ...]

    @property
    def max_sequence_tokens(self) -> int:
        return max(map(len, self.sequences))

    def create_kv_cache(self, factory: KVCacheFactory) -> KVCache:
        return factory.create_for(
            self.cached.attention, len(self.sequences), self.max_sequence_tokens
        )


def compute_expected(
    loaded: LoadedModel,
    block_size: int,
    stored: StoredLogits = lambda sequences, compute: compute(),
) -> ExpectedLogits:
    """Compute the expected logits with the plain model, before its parts are replaced.

    ``stored`` is given the sequences and a function that computes their logits; it returns these
    logits, computed or stored.

    If loading stores matrices unchanged (``as_stored``), this computation converts each matrix to
    float32 whenever a layer uses it. Raises ``EngineError`` if mlx_lm itself fails, or a layer does
    not use its cache.
    """
    try:
        return _compute_expected(loaded, block_size, stored)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, EngineError):
            raise
        reason = one_line(error)
        raise EngineError(f"model_type={loaded.model_type}: plain mlx_lm fails: {reason}") from None


def _compute_expected(loaded: LoadedModel, block_size: int, stored: StoredLogits) -> ExpectedLogits:
    from labkit.engine.model.dequantized_layers import dequantized_on_use, numpy_product

    model, as_stored = loaded.model, loaded.matrix_storage is MatrixStorage.as_stored
    with dequantized_on_use(model) if as_stored else nullcontext():
        shapes = cache_shapes(loaded)
        one = _lazy_logits(model, np.zeros((1, 1), np.int32), make_prompt_cache(model))
    rng, vocab = np.random.default_rng(0), one.shape[-1]
    steps = step_lengths(block_size)
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    sequences = tuple(rng.integers(0, vocab, n, dtype=np.int32) for n in lengths)

    def compute() -> Logits:
        products = dequantized_on_use(model, numpy_product) if as_stored else nullcontext()
        with products, single_thread():
            return _all_logits(model, sequences)

    logits = stored(sequences, compute)
    for array in (*sequences, *logits):
        array.flags.writeable = False  # engines share them (``ExpectedLogitsCache``)
    return ExpectedLogits(shapes, sequences, logits, steps)


class ExpectedLogitsCache:
    """The expected logits of the ``max_models`` models that this process loaded last.

    The logits depend on a model's files and on how the model is loaded, not on the engine. An entry
    is never changed after it is written, so any number of engines may share a cache.
    """

    def __init__(self, max_models: int) -> None:
        self._max_models = max_models
        self._logits: dict[tuple[Any, ...], ExpectedLogits] = {}
        self._lock = threading.Lock()

    def get(
        self, model_dir: Path, loading: tuple[Any, ...], compute: Callable[[], ExpectedLogits]
    ) -> ExpectedLogits:
        """Return the cached logits of a model, or call ``compute`` if there are none.

        ``loading`` are the options with which the model is loaded. Logits that were cached before
        one of the model's files was written or replaced are not used.
        """
        key = (file_states(model_dir), *loading)
        with self._lock:
            known = self._logits.pop(key, None)
        expected = compute() if known is None else known
        with self._lock:
            self._logits[key] = expected  # at the end: the first is the least recently used
            while len(self._logits) > self._max_models:
                del self._logits[next(iter(self._logits))]
        return expected


def file_states(model_dir: Path) -> tuple[tuple[Any, ...], ...]:
    """Return the paths and states of the files of a model."""
    files = [model_dir / "config.json", *sorted(model_dir.glob("model*.safetensors"))]
    return tuple((file.resolve(), file_state(file)) for file in files)


# One for the process, because a model that is loaded again has the same logits.
EXPECTED_LOGITS = ExpectedLogitsCache(max_models=4)


def step_lengths(block_size: int) -> tuple[tuple[int, int], ...]:
    """Return, for each step, the number of tokens of each of the two sequences.

    The steps include chunks, mixed batches and sequences longer than a block. The last two steps
    are pure decodes, so that the last one can replay the graph that the one before it captured.
    """
    return ((block_size - 3, 0), (6, 1), (1, 4), (1, 1), (1, 1))


def _lazy_logits(model: Any, ids: NDArray[np.int32], caches: Any) -> Any:
    import mlx.core as mx

    return model(mx.array(ids), cache=caches).astype(mx.float32)


def _all_logits(model: Any, sequences: Sequences) -> Logits:
    """Return the logits of each sequence, [tokens, vocabulary], from one padded batch."""
    import mlx.core as mx

    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    logits = _lazy_logits(model, ids, make_prompt_cache(model))
    mx.eval(logits)
    rows = np.array(logits)
    return tuple(row[: len(ids)] for row, ids in zip(rows, sequences, strict=True))


def verify(
    loaded: LoadedModel,
    forward: PackedForward,
    kv_cache: KVCache,
    expected: ExpectedLogits,
    *dtypes: str,
) -> float:
    """Compare the forward's logits with the expected ones.

    ``kv_cache`` must have room for the test sequences. ``dtypes`` are the types of the cache's keys
    and values and of the activations. The narrowest of these and of the model's own dtype decides
    the tolerance.

    Returns the largest difference, as a fraction of the range of the logits. Raises ``EngineError``
    if the difference exceeds the tolerance, or the forward fails.
    """
    where = f"model_type={loaded.model_type} ({forward.name} forward)"
    differences = []
    try:
        for logits, reference in compute_logits(forward, kv_cache, expected, some_rows=True):
            differences.append(np.abs(logits - reference).max() / np.ptp(reference))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise EngineError(f"{where}: refused by the self-test: {_reason(error)}") from error
    worst = float(np.max(differences))  # keeps a NaN, which Python's max may lose
    dtype = max((expected.cached.dtype, *dtypes), key=lambda name: TOLERANCE[name])
    if not worst <= TOLERANCE[dtype]:
        raise EngineError(
            f"{where}: refused by the self-test: its logits differ from plain mlx_lm's by "
            f"{worst:.1e} of their range; the limit is {TOLERANCE[dtype]:.0e} in {dtype}"
        )
    return worst


def _reason(error: Exception) -> str:
    """Return why a forward failed: the line of mlx_lm that raised, or else the error's message.

    MLX's own messages only list the argument types of the function that was called.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and _is_in(frames[-1], "mlx"):
        frames.pop()  # a layer of mlx.nn that the model calls
    if not frames or not _is_in(frames[-1], "mlx_lm"):
        return one_line(error)
    frame = frames[-1]
    line = f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
    if KVHandle.__name__ in str(error):
        return (
            "mlx_lm's class computes attention itself, without scaled_dot_product_attention, which "
            f"labkit replaces ({line}); set engine=mlx_lm"
        )
    return f"mlx_lm's class does not run over packed tokens ({line}); set engine=mlx_lm"


def _is_in(frame: traceback.FrameSummary, package: str) -> bool:
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return any(Path(frame.filename).is_relative_to(folder) for folder in folders)


def compute_logits(
    forward: PackedForward, kv_cache: KVCache, expected: ExpectedLogits, *, some_rows: bool = False
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield each step's logits, one row per token, together with the expected logits.

    With ``some_rows``, only every other row of logits is computed in the first step, because
    serving does not compute all rows either.
    """
    for index, (batch, reference) in enumerate(_steps(expected, kv_cache.manager)):
        if some_rows and index == 0:
            batch, reference = batch._replace(logit_rows=batch.logit_rows[::2]), reference[::2]
        padded, attention = kv_cache.prepare_step(batch)
        yield np.asarray(forward(padded, attention, Counters())), reference


def require_batch_invariance(
    options: config.Engine,
    forward: PackedForward,
    factory: KVCacheFactory,
    expected: ExpectedLogits,
) -> None:
    """Check ``engine.batch_invariant``: a token's logits have the same bits in every batch.

    The logits must not depend on the other rows of the batch, on the chunks of the prompt, or on
    the step that computes the token. That holds if every operation computes each row with the same
    tile and the same order of summation. The config refuses options that are known to break batch
    invariance. This function tests the model: each of the self-test's sequences is computed alone
    and in one chunk, then both are computed in chunks of mixed batches. Raises ``EngineError`` if
    the logits differ in a bit, or the model runs on MLX with OpenBLAS, whose products are known to
    depend on the number of rows.
    """
    if forward.name == "mlx" and options.blas is config.Blas.openblas:
        raise EngineError(
            "engine.batch_invariant=true: this model runs on MLX, whose OpenBLAS products change "
            "with the number of rows; set engine.blas=stock or engine.batch_invariant=false"
        )
    first, second = map(len, expected.sequences)
    whole = replace(expected, steps=((first, 0), (0, second)))
    logits = tuple(
        rows for rows, _ in compute_logits(forward, expected.create_kv_cache(factory), whole)
    )
    for rows, reference in compute_logits(
        forward, expected.create_kv_cache(factory), replace(expected, logits=logits)
    ):
        if not np.array_equal(rows, reference):
            raise EngineError(
                "engine.batch_invariant=true: a token's logits change with the batch "
                f"({forward.name} forward); set engine.batch_invariant=false"
            )


def _steps(
    expected: ExpectedLogits, cache: KVCacheManager
) -> Iterator[tuple[Batch, NDArray[np.float32]]]:
    """Yield the batch of each step, and the expected logits of its tokens."""
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
        # A step of one token per sequence counts as pure decodes, to test their code paths too.
        prefill = batch.prefill_tokens if max(counts) > 1 else 0
        batch = batch._replace(logit_rows=rows, prefill_tokens=prefill)
        yield batch, np.concatenate(spans)
        for chunk in chunks:
            chunk.state.num_computed_tokens += chunk.num_tokens


def _shuffle(cache: KVCacheManager, requests: int) -> None:
    """Put the free blocks out of order, as they are after some time of serving."""
    decoys = [RequestState(Request(f"decoy {i}", (0,))) for i in range(2 * requests)]
    for decoy in decoys:
        cache.reserve(decoy, 1)
    for decoy in decoys[::2] + decoys[-1::-2]:
        cache.release(decoy.request_id)
