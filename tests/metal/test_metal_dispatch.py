"""The choice of kernel and grid, its reason, and the launch report."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import attend, batch

from labkit.config import RESOLVERS
from labkit.engine.attention import attention_metadata, kernel_dispatch, sequence_resolvers
from labkit.engine.attention.attention_metadata import AttentionLayer
from labkit.engine.attention.kernel_dispatch import Dispatch, KernelSwitches
from labkit.engine.attention.launch_evidence import Launch, launch_stamp, report_launches
from labkit.engine.attention.sequence_resolvers.work_plan import work_plan
from labkit.kernel_constants import KERNEL_IDS
from labkit.metal.kernels import header, source


def layer(heads=16, kv_heads=4, head_dim=128, dtype="float16"):
    options = 1.0, None, None, None
    return AttentionLayer(0, 0, heads, kv_heads, head_dim, 16, dtype, dtype, *options, head_dim)


def planned(query_lens, contexts, resolver="binary_search"):
    blocks = -(-max(contexts) // 16)
    return attention_metadata.build(
        sequence_resolvers.create(resolver),
        block_tables=np.zeros((len(contexts), blocks), np.int32),
        seq_lens=np.array(contexts, np.int32),
        cu_seqlens_q=np.cumsum([0, *query_lens]).astype(np.int32),
        num_blocks=1,
        block_size=16,
    )


def choose(batch, kind=None, resolver="binary_search", kernel="auto", on=None, **switches):
    switches = KernelSwitches(**{"unit": "head", **switches})
    metadata = planned(*batch, resolver)
    return kernel_dispatch.choose_kernel(
        metadata, kind or layer(), switches, on or kernel_dispatch.gpu_limits(14), kernel
    )


DECODE = [1] * 8, [2048] * 8
PREFILL = [98, 1, 1], [98, 50, 9]


def test_pure_decode_takes_the_decode_kernel():
    chosen = choose(DECODE)
    assert (chosen.kernel, chosen.grid, chosen.groups) == ("decode", (16, 8), (16, 8, 1))
    assert chosen.reason == "no prefill (query tokens: 8, sequences: 8)"


def test_prefill_takes_the_tiled_kernel():
    chosen = choose(PREFILL)
    assert (chosen.kernel, chosen.groups) == ("tiled", (16, 6, 1))
    assert chosen.reason == "prefill (query tokens: 100, sequences: 3)"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernel"),
    [("float32", 128, "tiled"), ("float32", 192, "decode"), ("bfloat16", 256, "tiled")],
)
def test_tiled_kernel_must_fit_the_registers(dtype, head_dim, kernel):
    kind = layer(dtype=dtype, head_dim=head_dim)
    chosen = choose(PREFILL, kind)
    assert chosen.kernel == kernel
    assert ("does not support float32 with head size 192" in chosen.reason) == (kernel == "decode")
    assert choose(PREFILL, kind, on=kernel_dispatch.cpu_limits(2)).kernel == "tiled"


def test_a_kernel_can_be_forced():
    assert choose(PREFILL, kernel="decode").kernel == "decode"
    with pytest.raises(
        ValueError, match="kernel=tiled does not support float32 with head size 256"
    ):
        choose(PREFILL, layer(dtype="float32", head_dim=256), kernel="tiled")
    with pytest.raises(ValueError, match="kernel=fast: must be auto"):
        choose(PREFILL, kernel="fast")


def test_grids_of_the_resolvers():
    assert choose(PREFILL, resolver="padded_grid").groups == (16, 4, 3)
    assert choose(PREFILL, resolver="work_plan").groups == (16, 6, 1)
    assert choose(([65, 1], [65, 1]), resolver="work_plan").groups == (16, 4, 1)
    assert choose(DECODE, resolver="padded_grid").groups == (16, 1, 8)
    assert choose(DECODE, resolver="padded_grid", split_kv=4).groups == (16, 1, 32)


def test_split_kv():
    assert choose(DECODE, split_kv=3).groups == (16, 8, 3)
    assert choose(DECODE, split_kv="auto").partitions == 1  # 128 units are enough
    chosen = choose(([1, 1], [2048, 2048]), split_kv="auto")
    assert chosen.partitions == 4  # 2,048 keys by 512
    assert chosen.reason.endswith("split_kv=auto: unsplit units (32) would leave cores idle")
    assert choose(([1, 1], [512, 512]), split_kv="auto").partitions == 1
    assert choose(([3, 1], [2048, 2048]), split_kv="auto", kernel="decode").partitions == 1
    unknown = kernel_dispatch.gpu_limits(None)
    assert choose(DECODE, split_kv=3, on=unknown, unit="auto").partitions == 3
    with pytest.raises(ValueError, match="cores could not be counted; set a number of partitions"):
        choose(DECODE, split_kv="auto", on=unknown)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shared"), [(16, 4, 4), (32, 2, 8), (7, 7, 1), (24, 2, 6)]
)
def test_the_unit_sets_the_grid_and_what_is_shared(heads, kv_heads, shared):
    kind, group = layer(heads, kv_heads), heads // kv_heads
    for unit, served in (("head", 1), ("kv_head", group), ("token", heads), ("auto", shared)):
        for lengths, sharing in ((DECODE, min(shared, served)), (PREFILL, 1)):
            chosen = choose(lengths, kind, unit=unit)
            expected = 1 if unit == "auto" and lengths is PREFILL else served
            assert (chosen.heads_per_unit, chosen.groups[0]) == (expected, heads // expected)
            assert chosen.sharing_heads == sharing


@pytest.mark.parametrize(
    ("workers", "tokens", "kind", "kv_heads"),
    [
        # Measured on two cores: all heads of a token in one unit take .3 to .9 of the time.
        (2, 1, (16, 4, 128), 4),
        (2, 7, (16, 8, 128), 8),
        (2, 1, (16, 8, 256), 4),  # 4,096 bytes are 4 heads of 256
        (2, 9, (9, 3, 64), 3),
        # More cores than half the units would serve: a token's heads are divided.
        (16, 1, (16, 8, 128), 1),
        (16, 4, (16, 8, 128), 4),
        (16, 7, (16, 8, 128), 4),
        (16, 8, (16, 8, 128), 8),
    ],
)
def test_a_cpu_unit_reads_all_kv_heads_that_fit_and_leave_half_of_the_cores_busy(
    workers, tokens, kind, kv_heads
):
    on, kind = kernel_dispatch.cpu_limits(workers), layer(*kind, "float32")
    group = kind.num_q_heads // kind.num_kv_heads
    chosen = choose(([1] * tokens, [64] * tokens), kind, on=on, unit="auto")
    assert (chosen.heads_per_unit, chosen.sharing_heads) == (group * kv_heads, group)
    assert chosen.grid == (kind.num_kv_heads // kv_heads, tokens)
    assert choose(PREFILL, kind, on=on, unit="auto").grid[0] == kind.num_kv_heads


def test_identity_needs_one_token_for_each_sequence_not_just_as_many():
    with pytest.raises(ValueError, match="handles decode only"):
        planned([2, 0, 1], [9, 9, 9], "identity")


def test_work_plan_lists_all_units_longest_walk_first():
    cu, seq_lens = np.array([0, 1, 1, 71, 73], np.int32), np.array([300, 9, 80, 50], np.int32)
    assert work_plan(cu, seq_lens, 32).tolist() == [[0, 0], [2, 64], [2, 32], [3, 0], [2, 0]]
    tokens = work_plan(cu, seq_lens, 1)
    assert sorted(map(tuple, tokens.tolist())) == (
        [(0, 0)] + [(2, i) for i in range(70)] + [(3, 0), (3, 1)]
    )  # fmt: skip


def test_a_row_that_was_not_written_shows_in_the_stamps():
    dispatch, metadata = (
        Dispatch("decode", (2, 2), "", 1, 1, 1, 1),
        planned([1, 1], [9, 9], "identity"),
    )
    stamp = launch_stamp(5, "decode", "identity")
    rows = np.array([[stamp + i, 2, 3, i % 2] for i in range(4)], np.uint64).astype(np.uint32)

    def stale(*written):
        launches = [Launch(layer(), dispatch, 5, rows) for rows in written]
        (report,) = report_launches(launches, metadata, "metal")
        return report.stale

    assert not stale(rows) and not stale(rows, rows)
    unwritten = rows.copy()
    unwritten[2] = 0
    for wrong in (unwritten, rows[::-1]):
        assert stale(wrong) and stale(rows, wrong)
    for other in ((5, "tiled", "identity"), (5, "decode", "seq_map"), (6, "decode", "identity")):
        assert stale(rows + np.uint32(launch_stamp(*other)) - np.uint32(stamp))


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("broken", [None, (0, 0, 0), (1, 0, 3), (1, 1, 2)])
def test_launches_of_one_kind_are_summed_and_the_stale_one_is_named(partitions, broken):
    """``broken``: launch, kernel (0 decode, 1 reduce) and row whose stamp is 5 too large."""
    rng = np.random.default_rng(3)
    metadata = planned([1, 1], [9, 9], "identity")
    dispatch = Dispatch("decode", (2, 2), "", 1, 1, 1, partitions)
    nonces = 0xFFFFFFF0, 7

    def rows(nonce, kernel):
        written = rng.integers(0, 99, (4, 6)).astype(np.uint32)
        stamp = launch_stamp(nonce, kernel, "identity")
        written[:, 0] = (stamp + np.arange(4)) & 0xFFFFFFFF
        return written

    written = [(rows(nonce, "decode"), rows(nonce, "reduce")) for nonce in nonces]
    if broken is not None:
        launch, kernel, row = broken
        written[launch][kernel][row, 0] += 5
    launches = [
        Launch(replace(layer(), index=index), dispatch, nonce, *pair[:partitions])
        for index, (nonce, pair) in enumerate(zip(nonces, written, strict=True))
    ]
    (report,) = report_launches(launches, metadata, "metal")
    shows = broken is not None and broken[1] < partitions
    stale = broken[0] if shows else 0
    assert (report.layer, report.stale) == (stale, shows)
    assert report.expected_stamp == launch_stamp(nonces[stale], "decode", "identity")
    assert report.stamp == (report.expected_stamp + 5 * shows) & 0xFFFFFFFF
    counted = report.search_iterations, report.kv_blocks_visited, report.surplus_threadgroups
    assert report.launches == 2
    assert counted == tuple(sum(main[:, i].sum() for main, _ in written) for i in (1, 2, 3))


def test_layers_are_summed_and_the_stale_one_is_named():
    """Two layers; the fourth launch of a null kernel writes no stamps."""
    launches = []

    def executor(call):
        nonce = int(dict(call.inputs)["nonce"].item())
        rows = np.zeros(call.outputs[1][1], np.uint32)
        stamp = launch_stamp(nonce, "decode", "binary_search")
        rows[:, 0] = (stamp + np.arange(len(rows))) & 0xFFFFFFFF
        rows[:, 2] = 3
        launches.append(call)
        (_, shape, dtype), _ = call.outputs
        return [mx.zeros(shape, dtype), mx.array(rows if len(launches) < 4 else 0 * rows)]

    from metal_batches import Launcher

    b = batch([1, 1], [20, 9])
    backend = Launcher(KernelSwitches(), executor)
    backend.adopt(*([pool] * 2 for pool in (b.k_pool, b.v_pool)))
    plan = backend.plan(
        block_tables=b.block_tables, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q
    )
    for index in range(2):
        backend.bind(index, scale=1.0, heads=4)
    for stale in (False, True):
        for index in range(2):
            backend.forward(index, mx.array(b.q), None, None, plan)
        (report,) = backend.report(plan)
        assert report.launches == report.counters()["kernel.decode"] == 2
        assert report.stale == stale and report.layer == (1 if stale else 0)
    assert report.kv_blocks_visited == 3 * 4  # of the launch that was seen
    assert backend.report(plan) == ()


def test_unsupported_dtypes_and_block_sizes_are_refused():
    b = batch([1], [5])
    with pytest.raises(ValueError, match="supports float32, float16 or bfloat16, not int32"):
        attend(type(b)(*list(vars(b).values())[:-1], mx.int32), executor=pytest.fail)
    with pytest.raises(
        ValueError, match="block size 4: must be one of 8, 16, 32 on device emulated"
    ):
        attend(batch([1], [5], block_size=4), executor=pytest.fail)


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_metal_device_is_refused_without_metal():
    from labkit.metal.kernel_call import executor_for

    with pytest.raises(ValueError, match="device=metal: there is no Metal on this machine"):
        executor_for("metal")


def test_kernel_and_resolver_ids_equal_those_of_the_sources():
    for number, word in enumerate(RESOLVERS, 1):
        assert f"{word.upper()} = {number}" in source("resolve"), word
    for name in ("decode", "tiled"):
        assert f"stamp_of(nonce, {KERNEL_IDS[name]}, RESOLVER)" in source(name)
    assert f"stamp_of(nonce, {KERNEL_IDS['reduce']}, RESOLVER)" in source("reduce")
    assert "constexpr int BQ = 32;" in source("tiled")


def test_sources_avoid_the_traps_of_mlx():
    assert header().endswith("\n")
    for name in ("decode", "tiled", "reduce"):
        # Attributes are found in the body only, and by substring.
        assert "threadgroup_position_in_grid" in source(name)
        assert "[[" not in source(name)
        assert "init_value" not in source(name)
