"""The emulated Metal kernels, called like every other backend."""

import sys
import types

import mlx.core as mx
import numpy as np
import pytest

from labkit.engine import attention
from labkit.engine.attention import paged_attention
from labkit.engine.attention.sequence_resolvers import seq_map

pytestmark = pytest.mark.usefixtures("compiler")

SHAPES = {
    "decode": [(1, 1), (1, 33), (1, 70)],
    "mixed": [(1, 40), (35, 35), (0, 9), (3, 50)],
}
RESOLVERS = ("seq_map", "identity", "padded_grid", "work_plan")
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 32}


@pytest.fixture(params=list(SHAPES))
def batch(request, make_batch):
    return make_batch(SHAPES[request.param], **SMALL)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "softcap": 3.0, "sinks": np.linspace(-2, 3, 4).astype(np.float32)}],
    ids=["plain", "all"],
)
def test_reference_cpu_and_emulated_agree(batch, options, assert_close):
    emulated, report = batch.attend(device="emulated", **options)
    expected, oracle = batch.attend("reference", **options)
    twin, cpu = batch.attend(**options)
    assert_close(emulated, expected)
    assert_close(twin, expected)
    assert not report.stale and report.counters()["device.emulated"] == 1
    assert cpu.counters()["device.cpu"] == 1 and cpu.kernel == report.kernel
    assert "device.emulated" not in oracle.counters()


@pytest.mark.parametrize(
    ("dtype", "error"), [(mx.float16, 2.0**-9), (mx.bfloat16, 2.0**-6)], ids=str
)
@pytest.mark.parametrize("block_size", [8, 32])
def test_half_precision(make_batch, dtype, error, block_size):
    batch = make_batch(SHAPES["mixed"], block_size=block_size, **SMALL)
    arrays = [mx.array(a).astype(dtype) for a in (batch.q, batch.k_pool, batch.v_pool)]
    options = {
        "block_tables": batch.block_tables,
        "seq_lens": batch.seq_lens,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "scale": 0.2,
    }
    out, report = paged_attention(*arrays, backend="emulated", **options)
    expected, _ = paged_attention(*arrays, backend="reference", **options)
    assert out.dtype == dtype and report.kernel == "tiled"
    out, expected = (np.array(a.astype(mx.float32)) for a in (out, expected))
    assert np.abs(out - expected).max() <= error * np.abs(expected).max()


def test_resolvers_give_the_same_bits_and_the_same_counts(batch):
    searched, report = batch.attend(device="emulated")
    assert report.search_iterations > 0
    for resolver in RESOLVERS:
        if resolver == "identity" and batch.cu_seqlens_q[-1] > 3:
            continue
        out, other = batch.attend(device="emulated", resolver=resolver)
        assert np.array_equal(out, searched), resolver
        assert other.resolver == resolver and not other.stale and other.search_iterations == 0
        assert other.kv_blocks_visited == report.kv_blocks_visited


@pytest.mark.parametrize(
    ("device", "resolver", "conversions"),
    [("emulated", "seq_map", 1), ("emulated", "binary_search", 0), ("cpu", "seq_map", 0)],
)
def test_the_time_of_maps_includes_their_conversion(batch, device, resolver, conversions):
    """The published 96 us are 86 to build a list and 10 to convert it."""
    backend = attention.create(device=device, resolver=resolver)
    plan = batch.plan(backend)
    assert plan.map_us == plan.build_us
    for _ in range(2):  # later layers of the step convert nothing
        _, report = batch.forward(backend, plan)
    assert len(plan.conversions_us) == conversions
    assert report.map_us == plan.map_us == plan.build_us + sum(plan.conversions_us)
    assert (report.map_us > plan.build_us) is bool(conversions)


def test_maps_of_a_user_resolver(batch, monkeypatch):
    class Mine:
        name = "mine"

        def maps(self, cu_seqlens_q, total_q, bq):
            return (
                seq_map.token_map(cu_seqlens_q),
                seq_map.qblock_map(cu_seqlens_q, total_q, bq),
            )

    module = types.ModuleType("resolver_of_mine")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, "resolver_of_mine", module)
    out, report = batch.attend(device="emulated", resolver="resolver_of_mine:Mine")
    assert np.array_equal(out, batch.attend(device="emulated")[0])
    assert report.counters()["resolver.mine"] == 1 and not report.stale


@pytest.mark.parametrize("unit", ["head", "kv_head", "token"])
def test_devices_count_the_same(batch, unit):
    """Loads in the tiled kernel are shared on the CPU only."""
    for resolver in ("binary_search", "padded_grid", "work_plan"):
        for window in (None, 20):
            options = {"resolver": resolver, "window": window, "unit": unit}
            _, emulated = batch.attend(device="emulated", **options)
            _, cpu = batch.attend(**options)
            ratio = cpu.sharing_heads if cpu.kernel == "tiled" else 1
            for name in ("kv_blocks_visited", "skipped_blocks"):
                assert getattr(emulated, name) == ratio * getattr(cpu, name), (options, name)
            for name in ("grid", "unit", "search_iterations", "surplus_threadgroups"):
                assert getattr(emulated, name) == getattr(cpu, name), (options, name)


@pytest.mark.parametrize("switch", [{"unit": "head"}, {"window_skip": False}])
def test_switches_change_no_bit(batch, switch):
    out, report = batch.attend(device="emulated", window=20)
    other, switched = batch.attend(device="emulated", window=20, **switch)
    assert np.array_equal(out, other)
    if report.kernel == "decode" or "window_skip" in switch:
        assert switched.kv_blocks_visited > report.kv_blocks_visited


def test_split_kv(make_batch, assert_close):
    batch = make_batch(SHAPES["decode"], **SMALL)
    out, report = batch.attend(device="emulated", split_kv=3)
    assert_close(out, batch.attend("reference")[0])
    assert report.counters()["split_kv.partitions"] == 3
    assert report.counters()["kernel.reduce"] == 1


def test_tile_threshold(make_batch):
    batch = make_batch([(1, 9), (5, 20)], **SMALL)
    _, tiled = batch.attend(device="emulated", tile_threshold=5)
    _, decode = batch.attend(device="emulated", tile_threshold=6)
    assert (tiled.kernel, decode.kernel) == ("tiled", "decode")


def test_writes_reach_the_pools_of_the_device(make_batch):
    """Two steps on one pool: attention reads the keys that were written."""
    batch = make_batch([(2, 18), (1, 7)], poison=False, **SMALL)
    backend = attention.create(device="emulated")
    plan = batch.plan(backend, scale=0.2)
    random = np.random.default_rng(3)

    def step():
        k, v = (random.standard_normal((3, 2, 32)).astype(np.float32) for _ in range(2))
        return batch.forward(backend, plan, k, v)[0]

    first, second = step(), step()
    assert not np.array_equal(first, second)
    batch.k_pool, batch.v_pool = (np.array(pools[0]) for pools in (backend.keys, backend.values))
    assert np.array_equal(second, batch.attend(device="emulated", scale=0.2)[0])


def test_unsupported_batches_are_refused(make_batch):
    with pytest.raises(
        ValueError, match="block size 4: must be one of 8, 16, 32 on device emulated"
    ):
        make_batch([(1, 9)], block_size=4).attend(device="emulated")
    with pytest.raises(ValueError, match="the batch has no query tokens"):
        make_batch([(0, 9)]).attend(device="emulated")


def test_without_a_compiler(monkeypatch):
    from labkit.metal.emulator import cpp_compilation

    monkeypatch.setenv("PATH", "")
    cpp_compilation.find_compiler.cache_clear()
    with pytest.raises(
        ValueError, match=r"device=emulated(: there is no g\+\+ on PATH; install| needs Linux)"
    ) as raised:
        attention.create(device="emulated")
    cpp_compilation.find_compiler.cache_clear()
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal():
    with pytest.raises(ValueError, match="device=metal: there is no Metal on this machine"):
        attention.create(device="metal")


@pytest.mark.skipif(mx.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda():
    with pytest.raises(ValueError, match="device=cuda: this MLX has no CUDA back-end") as raised:
        attention.create(device="cuda")
    assert "\n" not in str(raised.value)
