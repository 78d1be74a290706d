"""Batches of ragged sequences whose unused slots are poisoned."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from labkit.cpu.precision import kv_dtypes, kv_quantization_reference
from labkit.engine import attention
from labkit.engine.attention.attention_protocol import ArrayAdapter
from labkit.metal.emulator import EmulatorUnavailable
from labkit.metal.emulator.cpp_compilation import find_compiler

SWITCHES = ("device", "resolver", "split_kv", "unit", "window_skip", "tile_threshold")
# (query length, context) of each sequence.
SHAPES = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 200), (1, 64), (1, 65)],
    "mixed": [(1, 100), (70, 70), (0, 0), (33, 300), (1, 5), (0, 9)],
    "ragged_tail": [(31, 31), (32, 32), (33, 40), (64, 64), (1, 1), (65, 129)],
    "spec_verify": [(1, 51), (1, 52), (1, 53), (4, 90), (4, 64)],
    "one_prefill": [(129, 463)],
}


@dataclass
class Batch:
    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray

    def plan(self, backend, **options):
        """Let a backend adopt the pools and bind a layer; return the step's metadata."""
        backend.adopt([self.k_pool], [self.v_pool])
        metadata = backend.plan(
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            total_q=len(self.q),
        )
        options.setdefault("scale", max(1, self.q.shape[2]) ** -0.5)
        backend.bind(0, heads=self.q.shape[1], **options)
        return metadata

    def forward(self, backend, metadata, k=None, v=None, out=None):
        """Return output and report of one launch."""
        adapter = backend if backend.arrays == "numpy" else ArrayAdapter(backend)
        out = np.full_like(self.q, np.nan) if out is None else out
        result = adapter.forward(0, self.q, k, v, metadata, out)
        (report,) = adapter.report(metadata)
        return result, report

    def attend(self, backend="fused", **options):
        """Return output and report of a new backend; the output is NaN beforehand."""
        switches = {name: options.pop(name) for name in SWITCHES if name in options}
        owner = attention.create(backend=backend, **switches)
        return self.forward(owner, self.plan(owner, **options))

    def stored(self, dtype):
        """Return the batch with pools of this dtype."""
        quantised = dtype in kv_dtypes.QUANTIZED_BITS
        store = kv_quantization_reference.quantize if quantised else kv_dtypes.from_float32
        return self._with(*(store(pool, dtype) for pool in (self.k_pool, self.v_pool)))

    def widened(self):
        """Return the batch with pools of the same numbers in float32, for the oracle."""
        name = kv_dtypes.pool_dtype_name(self.k_pool)
        if name in kv_dtypes.QUANTIZED_BITS:
            pools = (
                kv_quantization_reference.dequantize(p, name) for p in (self.k_pool, self.v_pool)
            )
            return self._with(*pools)
        return self._with(*map(kv_dtypes.to_float32, (self.k_pool, self.v_pool)))

    def _with(self, k_pool, v_pool):
        return replace(self, k_pool=k_pool, v_pool=v_pool)

    def keys(self, sequence):
        """Return copies of one sequence's keys and values, in order."""
        context = self.seq_lens[sequence]
        size = self.k_pool.shape[1]
        blocks = self.block_tables[sequence, : -(-context // size)]
        return tuple(
            pool[blocks].reshape(-1, *pool.shape[2:])[:context]
            for pool in (self.k_pool, self.v_pool)
        )


def _make_batch(
    lengths, *, block_size=16, heads=8, kv_heads=2, head_dim=64, seed=0, poison=True, shift=0.0
):
    """Return a batch on shuffled blocks.

    ``poison``: unused slots hold NaN and infinity. ``shift`` is added to every logit before
    scaling: one dimension of q is 1, the same one of k is ``shift``.
    """
    random = np.random.default_rng(seed)
    counts = [-(-context // block_size) for _, context in lengths]
    ids = random.permutation(np.arange(1, sum(counts) + 1))
    tables = np.zeros((len(lengths), max([*counts, 1])), dtype=np.int32)
    used = 0
    for sequence, count in enumerate(counts):
        tables[sequence, :count] = ids[used : used + count]
        used += count
    shape = (used + 1, block_size, kv_heads, head_dim)
    k_pool, v_pool = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    cu = np.cumsum([0] + [query for query, _ in lengths]).astype(np.int32)
    q = random.standard_normal((cu[-1], heads, head_dim)).astype(np.float32)
    if shift:
        q[..., 0] = 1
        k_pool[..., 0] = shift
    if poison:
        k_pool[0], v_pool[0] = np.nan, np.inf
        for sequence, (_, context) in enumerate(lengths):
            if context % block_size:
                last = tables[sequence, context // block_size]
                k_pool[last, context % block_size :] = np.inf
                v_pool[last, context % block_size :] = np.nan
    lens = np.array([context for _, context in lengths], dtype=np.int32)
    return Batch(q, k_pool, v_pool, tables, lens, cu)


@pytest.fixture(params=list(SHAPES))
def lengths(request):
    """Batches that together reach every branch of both kernels."""
    return SHAPES[request.param]


@pytest.fixture
def compiler():
    """Skip the test if the emulator has no compiler."""
    try:
        return find_compiler()
    except EmulatorUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def make_batch():
    """The function that builds a ``Batch``."""
    return _make_batch


@pytest.fixture(scope="session")
def assert_close():
    """Assert equality with the oracle within the accuracy of float32 kernels."""

    def check(actual, expected, largest_logit=10.0):
        assert actual.shape == expected.shape
        error = np.abs(actual.astype(np.float64) - expected).max(initial=0)
        largest = np.abs(expected).max(initial=0)
        assert error <= 4e-6 * (1 + largest_logit / 10) * largest, error

    return check
