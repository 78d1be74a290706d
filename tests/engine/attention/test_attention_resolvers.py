"""Resolvers: maps with known answers, equal bits, and what a wrong one may do."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine import attention
from labkit.engine.attention.resolvers import seq_map


class Wrong:
    """Swaps one token's sequence and moves one Q-block: in range, but wrong."""

    name = "wrong"

    def maps(self, cu_seqlens_q, total_q, bq):
        tokens = seq_map.token_map(cu_seqlens_q)
        blocks = seq_map.qblock_map(cu_seqlens_q, total_q, bq)
        tokens[-1] = 0
        blocks[0] = len(cu_seqlens_q) - 2
        return tokens, blocks


class Mine:
    """A right one."""

    name = "mine"

    def maps(self, cu_seqlens_q, total_q, bq):
        return (
            seq_map.token_map(cu_seqlens_q),
            seq_map.qblock_map(cu_seqlens_q, total_q, bq),
        )


def answering(answer):
    """Return a class whose maps are ``answer(token_map, qblock_map)``."""

    class Answering(Mine):
        def maps(self, cu_seqlens_q, total_q, bq):
            return answer(*super().maps(cu_seqlens_q, total_q, bq))

    return Answering


@pytest.fixture
def resolver(monkeypatch):
    """Make a class reachable as ``package.module:Class``."""

    def named(made):
        module = types.ModuleType("resolver_of_mine")
        module.Made = made
        monkeypatch.setitem(sys.modules, "resolver_of_mine", module)
        return "resolver_of_mine:Made"

    return named


def test_maps_of_a_known_batch():
    cu = np.array([0, 1, 1, 71, 103], dtype=np.int32)
    assert seq_map.token_map(cu).tolist() == [0] + [2] * 70 + [3] * 32
    # 103 // 32 + 4 blocks; sequence s owns those from cu[s] // 32 + s on.
    assert seq_map.qblock_map(cu, 103, 32).tolist() == [0, -1, 2, 2, 2, 3, -1]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_qblock_map_is_what_the_search_finds(lengths):
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    blocks = seq_map.qblock_map(cu, int(cu[-1]), 32)
    for block, owner in enumerate(blocks):
        found = max(i for i in range(len(cu)) if cu[i] // 32 + i <= block)
        start = (block - (cu[found] // 32 + found)) * 32
        assert owner == (found if start < lengths[found] else -1)


def test_resolvers_give_the_same_bits(batch, lengths, resolver):
    made = batch(lengths)
    for options in ({}, {"window": 20}):
        searched, report = made.attend(**options)
        mapped, mapped_report = made.attend(resolver="seq_map", **options)
        mine, mine_report = made.attend(resolver=resolver(Mine), **options)
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
def test_the_host_names_the_sequence(batch, lengths, resolver, options):
    made = batch(lengths)
    searched, report = made.attend(**options)
    out, other = made.attend(resolver=resolver, **options)
    assert np.array_equal(searched, out)
    assert other.search_iterations == 0 and other.resolver == resolver
    assert other.kv_blocks_visited == report.kv_blocks_visited
    assert not other.stale and other.stamp != report.stamp
    oracle, _ = made.attend("reference", resolver=resolver)
    assert np.array_equal(oracle, made.attend("reference")[0])


def test_dependent_loads_of_a_known_batch(batch):
    """A search of two or of three steps per unit, one load per mapped unit, else none."""
    made = batch([(1, 16), (1, 17)], heads=4, kv_heads=2)
    loads = {
        resolver: made.attend(resolver=resolver)[1].counters()["attention.dependent_loads"]
        for resolver in ("binary_search", "seq_map", "work_plan", "identity", "padded_grid")
    }
    assert loads == {
        "binary_search": 2 * (1 + 2),
        "seq_map": 4,
        "work_plan": 4,
        "identity": 0,
        "padded_grid": 0,
    }


def test_grids_of_the_host(batch):
    """Known answers: units of the padded grid without work exit; the plan has none."""
    made = batch([(33, 33), (1, 40), (0, 7), (30, 30)], heads=4, kv_heads=2)
    _, padded = made.attend(resolver="padded_grid")
    assert padded.grid == (2, 2, 4)
    assert padded.surplus_threadgroups == 2 * (8 - 4)
    _, planned = made.attend(resolver="work_plan")
    assert planned.grid == (2, 4) and planned.surplus_threadgroups == 0
    assert planned.map_us > 0 and padded.map_us == 0
    _, tokens = made.attend(resolver="padded_grid", tile_threshold=1000)
    assert tokens.grid == (1, 33, 4)  # one unit serves both KV heads
    assert tokens.surplus_threadgroups == 4 * 33 - 64
    _, tokens = made.attend(resolver="work_plan", tile_threshold=1000)
    assert tokens.grid == (1, 64) and tokens.surplus_threadgroups == 0


def test_identity_takes_pure_decode_only(batch):
    made = batch([(1, 30), (1, 5), (1, 100)])
    out, report = made.attend(resolver="identity")
    assert np.array_equal(out, made.attend()[0])
    assert report.counters()["resolver.identity"] == 1
    for lengths in ([(1, 30), (2, 5)], [(1, 30), (0, 5)]):
        with pytest.raises(ValueError, match="resolver=identity: takes pure decode only"):
            batch(lengths).attend(resolver="identity")


def test_counters_of_a_known_batch(batch):
    """One search per unit and KV head; surplus blocks exit; a block counts per KV head."""
    made = batch([(1, 16), (1, 17)], heads=4, kv_heads=2)
    _, report = made.attend()
    assert report.grid == (2, 2)
    assert report.kv_blocks_visited == 2 * (1 + 2)
    assert report.search_iterations == 2 * (1 + 2)
    made = batch([(33, 33), (1, 40), (30, 30)], heads=4, kv_heads=2)
    _, report = made.attend()
    assert report.grid == (2, 64 // 32 + 3)
    assert report.surplus_threadgroups == 2 * (5 - 4)
    assert report.kv_blocks_visited == 2 * (2 + 3 + 3 + 2)
    block = 2 * 16 * 64 * 4
    assert report.bytes == report.kv_blocks_visited * block + 2 * made.q.nbytes


def test_wrong_maps_run_and_are_seen(batch, lengths, resolver, assert_close):
    made = batch(lengths, poison=False)
    if len(lengths) == 1:
        pytest.skip("one sequence: no wrong map is in range")
    right, _ = made.attend()
    wrong, report = made.attend(resolver=resolver(Wrong))
    assert report.resolver == "wrong" and not report.stale
    assert not np.array_equal(right, wrong, equal_nan=True)


@given(data=st.data())
def test_any_map_in_range_is_safe(batch, data):
    """Random maps over exact-size pools: a read past an end would fault or show as NaN."""
    made = batch([(1, 30), (0, 0), (40, 60), (0, 16), (3, 3)], heads=2, kv_heads=1, head_dim=16)
    backend = attention.create(resolver="seq_map")
    meta = made.plan(backend, scale=0.2)
    numbers = st.integers(-1, 4)
    meta.lookup.qblock_map[:] = data.draw(
        st.lists(numbers, min_size=len(meta.lookup.qblock_map), max_size=6)
    )
    out, _ = made.forward(backend, meta, out=np.zeros_like(made.q))
    assert np.isfinite(out).all()


@given(data=st.data())
def test_any_token_map_in_range_is_safe(batch, data):
    made = batch([(1, 30), (1, 1), (0, 0), (1, 60), (0, 16)], heads=2, kv_heads=1, head_dim=16)
    backend = attention.create(resolver="seq_map")
    meta = made.plan(backend, scale=0.2)
    owners = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    meta.lookup.token_map[:] = owners
    out, _ = made.forward(backend, meta)
    oracle = attention.create(backend="reference", resolver="seq_map")
    planned = made.plan(oracle, scale=0.2)
    planned.lookup.token_map[:] = owners
    expected, _ = made.forward(oracle, planned)
    assert np.isfinite(out).all()
    assert np.abs(out - expected).max() < 1e-5


MISTAKES = [
    (lambda t, b: (t.astype(np.int64), b), "token_map must be a NumPy array of int32, not int64"),
    (lambda t, b: (list(t), b), "token_map must be a NumPy array of int32, not list"),
    (lambda t, b: (t[1:], b), r"token_map must have shape \(41,\), not \(40,\)"),
    (lambda t, b: (t, b[:, None]), r"qblock_map must have shape \(3,\), not \(3, 1\)"),
    (lambda t, b: (t - 1, b), r"token_map\[0\] is -1: allowed are 0 to 1"),
    (lambda t, b: (t, b + 1), r"qblock_map\[1\] is 2: allowed are -1 to 1"),
    (lambda t, b: t, r"must return \(token_map, qblock_map\)"),
    (lambda t, b: 1 / 0, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("answer", "message"), MISTAKES)
def test_maps_that_no_kernel_may_read(batch, resolver, answer, message):
    made = batch([(1, 30), (40, 60)])
    path = resolver(answering(answer))
    with pytest.raises(ValueError, match=message) as raised:
        made.attend(resolver=path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"resolver={path}: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nope",
            "allowed are binary_search, seq_map, identity, padded_grid, work_plan or package",
        ),
        ("no.such.module:Class", "ModuleNotFoundError"),
        ("labkit.engine.attention.launch_report:Nope", "AttributeError"),
        ("labkit.engine.attention.launch_report:LaunchReport", "TypeError"),
        ("collections:OrderedDict", "no `name`"),
    ],
)
def test_resolvers_that_cannot_be_loaded(name, message):
    with pytest.raises(ValueError, match=message) as raised:
        attention.create(resolver=name)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"resolver={name}: ")
