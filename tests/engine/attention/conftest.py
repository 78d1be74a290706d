"""Batches of ragged sequences whose unused slots are poisoned."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from labkit.cpu import kv_dtypes
from labkit.engine import attention
from labkit.engine.attention import array_adapter
from labkit.metal.emulator.cpp_compilation import find_compiler
from labkit.metal.emulator.emulator_errors import EmulatorUnavailable

SWITCHES = ("device", "resolver", "split_kv", "gqa_sharing", "window_skip", "tile_threshold")
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
        """Hand the pools over, bind the layer, plan."""
        backend.adopt([self.k_pool], [self.v_pool])
        plan = backend.plan(
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            total_q=len(self.q),
        )
        options.setdefault("scale", max(1, self.q.shape[2]) ** -0.5)
        backend.bind(0, heads=self.q.shape[1], **options)
        return plan

    def forward(self, backend, plan, k=None, v=None, out=None):
        """Return output and report of one launch."""
        made = array_adapter.adapt("numpy", backend)
        out = np.full_like(self.q, np.nan) if out is None else out
        result = made.forward(0, self.q, k, v, plan, out)
        (report,) = made.report(plan)
        return result, report

    def attend(self, backend="fused", **options):
        """Return output and report; the output is poisoned beforehand."""
        switches = {name: options.pop(name) for name in SWITCHES if name in options}
        made = attention.create(backend=backend, **switches)
        return self.forward(made, self.plan(made, **options))

    def stored(self, kind):
        """Return the batch with pools of that type."""
        pools = (kv_dtypes.from_float32(pool, kind) for pool in (self.k_pool, self.v_pool))
        return self._with(*pools)

    def widened(self):
        """Return the batch with float32 pools of what its pools hold, for the oracle."""
        return self._with(*map(kv_dtypes.to_float32, (self.k_pool, self.v_pool)))

    def _with(self, k_pool, v_pool):
        return replace(self, k_pool=k_pool, v_pool=v_pool)

    def keys(self, sequence):
        """Return views (copies) of one sequence's keys and values, in order."""
        context = self.seq_lens[sequence]
        size = self.k_pool.shape[1]
        blocks = self.block_tables[sequence, : -(-context // size)]
        return tuple(
            pool[blocks].reshape(-1, *pool.shape[2:])[:context]
            for pool in (self.k_pool, self.v_pool)
        )


def make_batch(
    lengths, *, block_size=16, heads=8, kv_heads=2, head_dim=64, seed=0, poison=True, shift=0.0
):
    """Make a batch on shuffled blocks; unused slots hold NaN and infinity if poisoned.

    ``shift`` is added to every logit (before the scale of ``head_dim ** -0.5``): one
    dimension of q is 1, that of k the shift.
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
    """Shapes that together reach every branch of both kernels."""
    return SHAPES[request.param]


@pytest.fixture
def compiler():
    """Skip, with the reason, where the emulator has no compiler."""
    try:
        return find_compiler()
    except EmulatorUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def batch():
    """The function that makes a batch."""
    return make_batch


@pytest.fixture(scope="session")
def assert_close():
    """Compare with the oracle at the accuracy that float32 kernels promise."""

    def check(actual, expected, largest_logit=10.0):
        assert actual.shape == expected.shape
        error = np.abs(actual.astype(np.float64) - expected).max(initial=0)
        largest = np.abs(expected).max(initial=0)
        assert error <= 4e-6 * (1 + largest_logit / 10) * largest, error

    return check
