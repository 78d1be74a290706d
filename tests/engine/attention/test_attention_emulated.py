"""The Metal kernels, emulated, behind the same operation as every other backend."""

import sys
import types

import mlx.core as mx
import numpy as np
import pytest

from labkit.engine import attention
from labkit.engine.attention import paged_attention
from labkit.engine.attention.resolvers import seq_map

pytestmark = pytest.mark.usefixtures("compiler")

SHAPES = {
    "decode": [(1, 1), (1, 33), (1, 70)],
    "mixed": [(1, 40), (35, 35), (0, 9), (3, 50)],
}
RESOLVERS = ("seq_map", "identity", "padded_grid", "work_plan")
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 32}


@pytest.fixture(params=list(SHAPES))
def made(request, batch):
    return batch(SHAPES[request.param], **SMALL)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20, "softcap": 3.0, "sinks": np.linspace(-2, 3, 4).astype(np.float32)}],
    ids=["plain", "all"],
)
def test_reference_cpu_and_emulated_agree(made, options, assert_close):
    emulated, report = made.attend(device="emulated", **options)
    expected, oracle = made.attend("reference", **options)
    twin, cpu = made.attend(**options)
    assert_close(emulated, expected)
    assert_close(twin, expected)
    assert not report.stale and report.counters()["device.emulated"] == 1
    assert cpu.counters()["device.cpu"] == 1 and cpu.kernel == report.kernel
    assert "device.emulated" not in oracle.counters()


@pytest.mark.parametrize(
    ("dtype", "error"), [(mx.float16, 2.0**-9), (mx.bfloat16, 2.0**-6)], ids=str
)
@pytest.mark.parametrize("block_size", [8, 32])
def test_half_precision(batch, dtype, error, block_size):
    made = batch(SHAPES["mixed"], block_size=block_size, **SMALL)
    arrays = [mx.array(a).astype(dtype) for a in (made.q, made.k_pool, made.v_pool)]
    how = {
        "block_tables": made.block_tables,
        "seq_lens": made.seq_lens,
        "cu_seqlens_q": made.cu_seqlens_q,
        "scale": 0.2,
    }
    out, report = paged_attention(*arrays, backend="emulated", **how)
    expected, _ = paged_attention(*arrays, backend="reference", **how)
    assert out.dtype == dtype and report.kernel == "tiled"
    out, expected = (np.array(a.astype(mx.float32)) for a in (out, expected))
    assert np.abs(out - expected).max() <= error * np.abs(expected).max()


def test_resolvers_give_the_same_bits_and_the_same_counts(made):
    searched, report = made.attend(device="emulated")
    assert report.search_iterations > 0
    for resolver in RESOLVERS:
        if resolver == "identity" and made.cu_seqlens_q[-1] > 3:
            continue
        out, other = made.attend(device="emulated", resolver=resolver)
        assert np.array_equal(out, searched), resolver
        assert other.resolver == resolver and not other.stale and other.search_iterations == 0
        assert other.kv_blocks_visited == report.kv_blocks_visited


def test_maps_of_a_users_own(made, monkeypatch):
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
    out, report = made.attend(device="emulated", resolver="resolver_of_mine:Mine")
    assert np.array_equal(out, made.attend(device="emulated")[0])
    assert report.counters()["resolver.mine"] == 1 and not report.stale


def test_devices_count_the_same(made):
    """Units differ (query heads there, KV heads here); per unit of a head they agree."""
    for resolver in ("padded_grid", "work_plan"):
        for window in (None, 20):
            _, there = made.attend(device="emulated", resolver=resolver, window=window)
            _, here = made.attend(resolver=resolver, window=window)
            ratio = 2 if here.kernel == "tiled" else 1  # decode shares heads on both
            for name in ("surplus_threadgroups", "kv_blocks_visited", "skipped_blocks"):
                assert getattr(there, name) == ratio * getattr(here, name), (resolver, name)


@pytest.mark.parametrize("switch", [{"gqa_sharing": False}, {"window_skip": False}])
def test_switches_change_no_bit(made, switch):
    out, report = made.attend(device="emulated", window=20)
    other, switched = made.attend(device="emulated", window=20, **switch)
    assert np.array_equal(out, other)
    if report.kernel == "decode" or "window_skip" in switch:
        assert switched.kv_blocks_visited > report.kv_blocks_visited


def test_split_kv(batch, assert_close):
    made = batch(SHAPES["decode"], **SMALL)
    out, report = made.attend(device="emulated", split_kv=3)
    assert_close(out, made.attend("reference")[0])
    assert report.counters()["split_kv.partitions"] == 3
    assert report.counters()["kernel.reduce"] == 1


def test_tile_threshold(batch):
    made = batch([(1, 9), (5, 20)], **SMALL)
    _, tiled = made.attend(device="emulated", tile_threshold=5)
    _, decode = made.attend(device="emulated", tile_threshold=6)
    assert (tiled.kernel, decode.kernel) == ("tiled", "decode")


def test_writes_reach_the_pools_of_the_device(batch):
    """Decode steps on one pool: what is attended to is what was written."""
    made = batch([(2, 18), (1, 7)], poison=False, **SMALL)
    backend = attention.create(device="emulated")
    plan = made.plan(backend, scale=0.2)
    random = np.random.default_rng(3)

    def step():
        k, v = (random.standard_normal((3, 2, 32)).astype(np.float32) for _ in range(2))
        return made.forward(backend, plan, k, v)[0]

    first, second = step(), step()
    assert not np.array_equal(first, second)
    made.k_pool, made.v_pool = (np.array(pools[0]) for pools in (backend.keys, backend.values))
    assert np.array_equal(second, made.attend(device="emulated", scale=0.2)[0])


def test_what_the_kernels_are_not_compiled_for(batch):
    with pytest.raises(ValueError, match="block size 4: device emulated takes 8, 16, 32"):
        batch([(1, 9)], block_size=4).attend(device="emulated")
    with pytest.raises(ValueError, match="no query tokens, nothing to launch"):
        batch([(0, 9)]).attend(device="emulated")


def test_without_a_compiler(monkeypatch):
    from labkit.metal.emulator import cpp_compilation

    monkeypatch.setenv("PATH", "")
    cpp_compilation.find_compiler.cache_clear()
    with pytest.raises(ValueError, match=r"device=emulated: no g\+\+ on PATH; install") as raised:
        attention.create(device="emulated")
    cpp_compilation.find_compiler.cache_clear()
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal():
    with pytest.raises(ValueError, match="device=metal: there is no Metal on this machine"):
        attention.create(device="metal")
