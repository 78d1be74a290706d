"""Which kernel runs, on what grid, why, and what the evidence says."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from metal_batches import batch

from labkit.metal import evidence
from labkit.metal.dispatch import Shape, choose
from labkit.metal.kernels import header, source
from labkit.metal.launch import Operands, Options, launch
from labkit.metal.work_plan import work_plan

DECODE = Shape(8, 8, 1, 2048, 16, 4, 128, "float16")
PREFILL = Shape(100, 3, 98, 98, 16, 4, 128, "float16")


def test_pure_decode_takes_the_decode_kernel():
    dispatch = choose(DECODE)
    assert (dispatch.kernel, dispatch.groups, dispatch.threads) == ("decode", (16, 8, 1), 256)
    assert dispatch.reason == "no prefill (8 query tokens of 8 sequences)"


def test_prefill_takes_the_tiled_kernel():
    dispatch = choose(PREFILL)
    assert (dispatch.kernel, dispatch.groups, dispatch.threads) == ("tiled", (16, 6, 1), 128)
    assert dispatch.reason == "prefill (100 query tokens of 3 sequences)"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernel"),
    [("float32", 128, "tiled"), ("float32", 192, "decode"), ("bfloat16", 256, "tiled")],
)
def test_tiled_kernel_must_fit_the_registers(dtype, head_dim, kernel):
    dispatch = choose(replace(PREFILL, dtype=dtype, head_dim=head_dim))
    assert dispatch.kernel == kernel
    assert ("does not take float32 with head size 192" in dispatch.reason) == (kernel == "decode")


def test_kernel_can_be_asked_for():
    assert choose(PREFILL, kernel="decode").kernel == "decode"
    with pytest.raises(ValueError, match="kernel=tiled: does not take float32 with head size 256"):
        choose(replace(PREFILL, dtype="float32", head_dim=256), kernel="tiled")


def test_grids_of_the_resolvers():
    assert choose(PREFILL, resolver="padded_grid").groups == (16, 4, 3)
    assert choose(PREFILL, resolver="work_plan", planned=5).groups == (16, 5, 1)
    assert choose(DECODE, resolver="padded_grid").groups == (16, 1, 8)
    assert choose(DECODE, resolver="padded_grid", split_kv=4).groups == (16, 1, 32)


def test_split_kv():
    assert choose(DECODE, split_kv=3).groups == (16, 8, 3)
    assert choose(DECODE, split_kv="auto").partitions == 1  # 128 threadgroups are enough
    few = replace(DECODE, total_q=2, num_seqs=2)
    dispatch = choose(few, split_kv="auto")
    assert dispatch.partitions == 4  # 2,048 keys by 512
    assert dispatch.reason.endswith("split_kv=auto: 32 threadgroups leave cores idle")
    assert choose(replace(few, max_seq_len=512), split_kv="auto").partitions == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shared"), [(16, 4, 4), (32, 2, 8), (7, 7, 1), (24, 2, 6)]
)
def test_gqa_sharing(heads, kv_heads, shared):
    shape = replace(DECODE, num_q_heads=heads, num_kv_heads=kv_heads)
    dispatch = choose(shape, gqa_sharing=True)
    assert dispatch.heads == shared
    assert dispatch.groups[0] == heads // shared
    assert choose(shape).heads == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolver": "identity"}, "resolver=identity: takes pure decode only"),
        ({"resolver": "guess"}, "resolver=guess: allowed are binary_search"),
        ({"resolver": "work_plan"}, "resolver=work_plan: the host's plan is missing"),
        ({"kernel": "fast"}, "kernel=fast: allowed are"),
        ({"split_kv": 0, "kernel": "decode"}, "split_kv=0: allowed are"),
        ({"split_kv": "some", "kernel": "decode"}, "split_kv=some: allowed are"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        choose(PREFILL, **options)


def test_identity_needs_one_token_for_each_sequence_not_just_as_many():
    with pytest.raises(ValueError, match="pure decode only"):
        choose(Shape(3, 3, 2, 9, 4, 2, 64, "float32"), resolver="identity")  # lengths 2, 0, 1


def test_work_plan_lists_all_units_longest_walk_first():
    cu, seq_lens = np.array([0, 1, 1, 71, 73], np.int32), np.array([300, 9, 80, 50], np.int32)
    assert work_plan(cu, seq_lens, 32).tolist() == [[0, 0], [2, 64], [2, 32], [3, 0], [2, 0]]
    tokens = work_plan(cu, seq_lens, 1)
    assert sorted(map(tuple, tokens.tolist())) == (
        [(0, 0)] + [(2, i) for i in range(70)] + [(3, 0), (3, 1)]
    )  # fmt: skip


def test_evidence_shows_a_row_that_was_not_written():
    stamp = evidence.expected_stamp("tiled", "seq_map", 5)
    rows = np.array([[stamp + i, 2, 3, i % 2] for i in range(4)], np.uint64).astype(np.uint32)
    good = evidence.read([("tiled", rows)], "seq_map", 5)
    assert good.stamp == good.expected_stamp == stamp
    assert (good.search_iterations, good.kv_blocks_visited, good.surplus_threadgroups) == (8, 12, 2)
    stale = rows.copy()
    stale[2] = 0
    for kernel, resolver, nonce, report in [
        ("tiled", "seq_map", 5, stale),
        ("decode", "seq_map", 5, rows),
        ("tiled", "identity", 5, rows),
        ("tiled", "seq_map", 6, rows),
        ("tiled", "seq_map", 5, rows[::-1]),
    ]:
        bad = evidence.read([(kernel, report)], resolver, nonce)
        assert bad.stamp != bad.expected_stamp
    reduced = evidence.read([("tiled", rows), ("reduce", rows)], "seq_map", 5)
    assert reduced.stamp != reduced.expected_stamp


def test_launch_refuses_what_the_kernels_are_not_compiled_for():
    b = batch([1], [5])

    def try_launch(message, options=None, **changes):
        arrays = {"q": b.q, "k_pool": b.k_pool, "v_pool": b.v_pool} | changes
        operands = Operands(
            **arrays, block_tables=b.block_tables, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q
        )
        with pytest.raises(ValueError, match=message) as error:
            launch(operands, options or Options(1.0), choose(DECODE), pytest.fail, nonce=1)
        assert "\n" not in str(error.value)

    try_launch("q must be float32, float16 or bfloat16", q=b.q.astype(np.int32))
    try_launch("k_pool must have q's dtype", k_pool=b.k_pool.astype(np.float16))
    try_launch("block size 4: allowed are 8, 16 and 32", k_pool=b.k_pool[:, :4])
    try_launch("head size 40: allowed are", q=b.q[:, :, :40])
    try_launch("no query tokens", q=b.q[:0])
    try_launch("resolver=seq_map: its lookup is missing", Options(1.0, "seq_map"))


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_metal_device_is_refused_without_metal():
    from labkit.metal.device import executor

    b = batch([1], [5])
    operands = Operands(b.q, b.k_pool, b.v_pool, b.block_tables, b.seq_lens, b.cu_seqlens_q)
    with pytest.raises(ValueError, match="device=metal: there is no Metal on this machine"):
        launch(operands, Options(1.0), choose(operands.shape()), executor("metal"), nonce=1)


def test_sources_heed_mlx_traps():
    assert header().endswith("\n")
    for name in ("decode", "tiled", "reduce"):
        # Attributes are found in the body only, and by substring.
        assert "threadgroup_position_in_grid" in source(name)
        assert "[[" not in source(name)
        assert "init_value" not in source(name)
