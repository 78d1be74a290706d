"""Resolvers: known maps, equal bits, and the harmless effects of wrong maps."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine import attention
from labkit.engine.attention import sequence_resolvers
from labkit.engine.attention.sequence_resolvers import seq_map


class WrongResolver:
    """Gives one token and one Q-block to other sequences: in range, but wrong."""

    name = "wrong"

    def maps(self, cu_seqlens_q, total_q, bq):
        tokens = seq_map.token_map(cu_seqlens_q)
        blocks = seq_map.qblock_map(cu_seqlens_q, total_q, bq)
        tokens[-1] = 0
        blocks[0] = len(cu_seqlens_q) - 2
        return tokens, blocks


class OwnResolver:
    """A correct resolver of a user's own."""

    name = "mine"

    def maps(self, cu_seqlens_q, total_q, bq):
        return (
            seq_map.token_map(cu_seqlens_q),
            seq_map.qblock_map(cu_seqlens_q, total_q, bq),
        )


def with_maps(change):
    """Return a resolver class whose maps are ``change(token_map, qblock_map)``."""

    class ChangedResolver(OwnResolver):
        def maps(self, cu_seqlens_q, total_q, bq):
            return change(*super().maps(cu_seqlens_q, total_q, bq))

    return ChangedResolver


@pytest.fixture
def resolver(monkeypatch):
    """A function that makes a class importable and returns its ``module:Class``."""

    def importable(cls):
        module = types.ModuleType("own_resolver")
        module.Own = cls
        monkeypatch.setitem(sys.modules, "own_resolver", module)
        return "own_resolver:Own"

    return importable


def test_maps_of_a_known_batch():
    cu = np.array([0, 1, 1, 71, 103], dtype=np.int32)
    assert seq_map.token_map(cu).tolist() == [0] + [2] * 70 + [3] * 32
    # 103 // 32 + 4 blocks; sequence s owns those from cu[s] // 32 + s on.
    assert seq_map.qblock_map(cu, 103, 32).tolist() == [0, -1, 2, 2, 2, 3, -1]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_qblock_map_equals_a_linear_search(lengths):
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    blocks = seq_map.qblock_map(cu, int(cu[-1]), 32)
    for block, owner in enumerate(blocks):
        sequence = max(i for i in range(len(cu)) if cu[i] // 32 + i <= block)
        start = (block - (cu[sequence] // 32 + sequence)) * 32
        assert owner == (sequence if start < lengths[sequence] else -1)


def test_resolvers_give_the_same_bits(make_batch, lengths, resolver):
    batch = make_batch(lengths)
    for options in ({}, {"window": 20}):
        searched, report = batch.attend(**options)
        mapped, mapped_report = batch.attend(resolver="seq_map", **options)
        mine, mine_report = batch.attend(resolver=resolver(OwnResolver), **options)
        assert np.array_equal(searched, mapped)
        assert np.array_equal(searched, mine)
        assert report.search_iterations > 0
        assert mapped_report.search_iterations == 0 and mapped_report.map_us > 0
        assert mine_report.resolver == "mine"
        for other in (mapped_report, mine_report):
            assert other.surplus_threadgroups == report.surplus_threadgroups
            assert other.kv_blocks_visited == report.kv_blocks_visited
            assert not other.stale
        assert len({r.stamp for r in (report, mapped_report, mine_report)}) == 3


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"tile_threshold": 1000}, {"split_kv": 3}])
@pytest.mark.parametrize("resolver", ["padded_grid", "work_plan"])
def test_resolvers_without_a_search_give_the_same_bits(make_batch, lengths, resolver, options):
    batch = make_batch(lengths)
    searched, report = batch.attend(**options)
    out, other = batch.attend(resolver=resolver, **options)
    assert np.array_equal(searched, out)
    assert other.search_iterations == 0 and other.resolver == resolver
    assert other.kv_blocks_visited == report.kv_blocks_visited
    assert not other.stale and other.stamp != report.stamp
    oracle, _ = batch.attend("reference", resolver=resolver)
    assert np.array_equal(oracle, batch.attend("reference")[0])


@pytest.mark.parametrize(
    ("resolver", "tokens", "qblocks"),
    [("seq_map", "token_map", "qblock_map"), ("work_plan", "tokens", "qblocks")],
)
def test_maps_of_the_tiled_kernel_are_built_only_for_a_batch_with_prefill(
    resolver, tokens, qblocks
):
    lookups = sequence_resolvers.create(resolver).lookup
    seq_lens = np.array([9, 40, 7], np.int32)
    decode, _ = lookups(np.array([0, 1, 2, 3], np.int32), seq_lens)
    mixed, _ = lookups(np.array([0, 1, 34, 35], np.int32), seq_lens)
    assert [len(getattr(decode, name)) for name in (tokens, qblocks)] == [3, 0]
    assert len(getattr(mixed, tokens)) == 35 and len(getattr(mixed, qblocks)) >= 4


def test_dependent_loads_of_a_known_batch(make_batch):
    """A search of two or of three steps per unit, one load per mapped unit, else none."""
    batch = make_batch([(1, 16), (1, 17)], heads=4, kv_heads=2)
    loads = {
        resolver: batch.attend(resolver=resolver, unit="kv_head")[1].counters()[
            "attention.dependent_loads"
        ]
        for resolver in ("binary_search", "seq_map", "work_plan", "identity", "padded_grid")
    }
    assert loads == {
        "binary_search": 2 * (1 + 2),
        "seq_map": 4,
        "work_plan": 4,
        "identity": 0,
        "padded_grid": 0,
    }


def test_grids_of_padded_grid_and_work_plan(make_batch):
    """Surplus units of the padded grid exit; the work plan has none."""
    batch = make_batch([(33, 33), (1, 40), (0, 7), (30, 30)], heads=4, kv_heads=2)
    _, padded = batch.attend(resolver="padded_grid")
    assert padded.grid == (2, 2, 4)
    assert padded.surplus_threadgroups == 2 * (8 - 4)
    _, planned = batch.attend(resolver="work_plan")
    assert planned.grid == (2, 4) and planned.surplus_threadgroups == 0
    assert planned.map_us > 0 and padded.map_us == 0
    _, tokens = batch.attend(resolver="padded_grid", tile_threshold=1000)
    assert tokens.grid == (1, 33, 4)  # one unit serves both KV heads
    assert tokens.surplus_threadgroups == 4 * 33 - 64
    _, tokens = batch.attend(resolver="work_plan", tile_threshold=1000)
    assert tokens.grid == (1, 64) and tokens.surplus_threadgroups == 0


def test_identity_takes_pure_decode_only(make_batch):
    batch = make_batch([(1, 30), (1, 5), (1, 100)])
    out, report = batch.attend(resolver="identity")
    assert np.array_equal(out, batch.attend()[0])
    assert report.counters()["resolver.identity"] == 1
    for lengths in ([(1, 30), (2, 5)], [(1, 30), (0, 5)]):
        with pytest.raises(ValueError, match="resolver=identity handles decode only"):
            make_batch(lengths).attend(resolver="identity")


def test_counters_of_a_known_batch(make_batch):
    """One search per unit and KV head; surplus blocks exit; a block counts per KV head."""
    batch = make_batch([(1, 16), (1, 17)], heads=4, kv_heads=2)
    _, report = batch.attend(unit="kv_head")
    assert report.grid == (2, 2)
    assert report.kv_blocks_visited == 2 * (1 + 2)
    assert report.search_iterations == 2 * (1 + 2)
    batch = make_batch([(33, 33), (1, 40), (30, 30)], heads=4, kv_heads=2)
    _, report = batch.attend()
    assert report.grid == (2, 64 // 32 + 3)
    assert report.surplus_threadgroups == 2 * (5 - 4)
    assert report.kv_blocks_visited == 2 * (2 + 3 + 3 + 2)
    block = 2 * 16 * 64 * 4
    assert report.bytes == report.kv_blocks_visited * block + 2 * batch.q.nbytes


def test_wrong_maps_run_and_change_the_output(make_batch, lengths, resolver, assert_close):
    batch = make_batch(lengths, poison=False)
    if len(lengths) == 1:
        pytest.skip("one sequence: no wrong map is in range")
    right, _ = batch.attend()
    wrong, report = batch.attend(resolver=resolver(WrongResolver))
    assert report.resolver == "wrong" and not report.stale
    assert not np.array_equal(right, wrong, equal_nan=True)


@given(data=st.data())
def test_any_map_in_range_is_safe(make_batch, data):
    """Random maps over exact-size pools: a read past an end would fault or show as NaN."""
    batch = make_batch(
        [(1, 30), (0, 0), (40, 60), (0, 16), (3, 3)], heads=2, kv_heads=1, head_dim=16
    )
    backend = attention.create(resolver="seq_map")
    metadata = batch.plan(backend, scale=0.2)
    numbers = st.integers(-1, 4)
    metadata.lookup.qblock_map[:] = data.draw(
        st.lists(numbers, min_size=len(metadata.lookup.qblock_map), max_size=6)
    )
    out, _ = batch.forward(backend, metadata, out=np.zeros_like(batch.q))
    assert np.isfinite(out).all()


@given(data=st.data())
def test_any_token_map_in_range_is_safe(make_batch, data):
    batch = make_batch(
        [(1, 30), (1, 1), (0, 0), (1, 60), (0, 16)], heads=2, kv_heads=1, head_dim=16
    )
    backend = attention.create(resolver="seq_map")
    metadata = batch.plan(backend, scale=0.2)
    owners = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    metadata.lookup.token_map[:] = owners
    out, _ = batch.forward(backend, metadata)
    oracle = attention.create(backend="reference", resolver="seq_map")
    planned = batch.plan(oracle, scale=0.2)
    planned.lookup.token_map[:] = owners
    expected, _ = batch.forward(oracle, planned)
    assert np.isfinite(out).all()
    assert np.abs(out - expected).max() < 1e-5


INVALID_MAPS = [
    (lambda t, b: (t.astype(np.int64), b), "token_map must be a NumPy array of int32, not int64"),
    (lambda t, b: (list(t), b), "token_map must be a NumPy array of int32, not list"),
    (lambda t, b: (t[1:], b), r"token_map must have shape \(41,\), not \(40,\)"),
    (lambda t, b: (t, b[:, None]), r"qblock_map must have shape \(3,\), not \(3, 1\)"),
    (lambda t, b: (t - 1, b), r"token_map\[0\] is -1; it must be 0 to 1"),
    (lambda t, b: (t, b + 1), r"qblock_map\[1\] is 2; it must be -1 to 1"),
    (lambda t, b: t, r"must return \(token_map, qblock_map\)"),
    (lambda t, b: 1 / 0, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("change", "message"), INVALID_MAPS)
def test_invalid_maps_are_refused(make_batch, resolver, change, message):
    batch = make_batch([(1, 30), (40, 60)])
    path = resolver(with_maps(change))
    with pytest.raises(ValueError, match=message) as raised:
        batch.attend(resolver=path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"resolver={path}: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nope",
            "must be binary_search, seq_map, identity, padded_grid, work_plan or package",
        ),
        ("no.such.module:Class", "ModuleNotFoundError"),
        ("labkit.engine.attention.launch_evidence:Nope", "AttributeError"),
        ("labkit.engine.attention.launch_evidence:LaunchReport", "TypeError"),
        ("collections:OrderedDict", "the class needs an attribute `name`"),
    ],
)
def test_unloadable_resolvers_are_refused(name, message):
    with pytest.raises(ValueError, match=message) as raised:
        attention.create(resolver=name)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"resolver={name}: ")
