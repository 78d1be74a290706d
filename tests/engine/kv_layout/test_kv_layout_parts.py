"""Parts of the KV layouts: wasted memory of padding, and rows that keep their tokens when moved."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import config
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.kv_cache_interface import ComputedTokenCount, KVCacheFactory
from labkit.engine.memory_budget.required_kv_slots import blocks_for, round_up_to_step, slots_for
from labkit.engine.request import Request, RequestState
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput

SHAPES = (KVShape(2, 4, 6), KVShape(1, 2, 2))
TOKEN_BYTES = 4 * (2 * 10 + 4)


def factory_of(engine, layout, scheduler=None, **options):
    kv = config.KV(layout=config.KVLayout(layout), **options)
    attention = config.Attention(backend="sdpa")
    return KVCacheFactory(
        config.Engine(
            name=engine, kv=kv, attention=attention, scheduler=scheduler or config.Scheduler()
        )
    )


def contiguous_factory(**options):
    return factory_of("contiguous", "contiguous", **options)


SPLIT = {"order": config.Order.prefill_first, "composition": config.Composition.split}
PADDED = factory_of("padded", "padded", config.Scheduler(**SPLIT))
STATIC = factory_of("naive", "padded", config.Scheduler(admission=config.Admission.static, **SPLIT))
CONTIGUOUS = contiguous_factory()


@pytest.mark.parametrize(("tokens", "memory"), [(1, 256), (256, 256), (257, 512)])
def test_memory_comes_in_steps(tokens, memory):
    assert round_up_to_step(tokens) == memory


@pytest.mark.parametrize(
    ("layout", "tokens", "blocks"),
    [("paged", 17, 3), ("paged", 16, 2), ("padded", 17, 16), ("contiguous", 257, 32)],
)
def test_the_bytes_of_one_request(layout, tokens, blocks):
    """As planned before anything runs, and as the layouts themselves refuse."""
    kv = config.KV(layout=config.KVLayout(layout))
    assert blocks_for(kv, [tokens]) == blocks
    if layout != "paged":
        kind = PADDED if layout == "padded" else CONTIGUOUS
        assert kind.create(SHAPES, blocks).manager.refusal_reason(tokens) is None
        assert kind.create(SHAPES, blocks - 1).manager.refusal_reason(tokens) is not None


@pytest.mark.parametrize(
    ("layout", "slots"),
    [("paged", 30_000 + 5_008 + 16), ("contiguous", 30_208 + 5_120 + 256), ("padded", 3 * 30_208)],
)
def test_the_bytes_of_several_requests(layout, slots):
    kv = config.KV(layout=config.KVLayout(layout))
    assert slots_for(kv, [30_000, 5_000, 10]) == slots
    assert slots_for(kv, []) == 0


def test_reserved_slots_are_held_from_the_beginning():
    kv = config.KV(layout=config.KVLayout("contiguous"), set_aside=600)
    assert slots_for(kv, [10, 30, 1_000]) == 768 + 768 + 1_024
    harness = Harness(contiguous_factory(set_aside=600))
    cache = harness.kv_cache.manager
    harness.join("1", 10, 20)
    assert cache.reserved_bytes == 768 * TOKEN_BYTES  # nothing is computed yet
    harness.step({"1": 10})
    harness.join("2", 500, 500)
    harness.step({"2": 500})
    assert cache.reserved_bytes == 2 * 768 * TOKEN_BYTES and cache.counters()["kv.moves"] == 0
    harness.step({"1": 1, "2": 400})  # more than was set aside: it grows as others do
    assert cache.reserved_bytes == (768 + 1_024) * TOKEN_BYTES
    assert cache.counters()["kv.set_aside"] == 2 * 768
    cache.reset_counters()
    assert cache.counters()["kv.set_aside"] == 0
    assert (
        not contiguous_factory(set_aside=600)
        .create(SHAPES, 2 * 768 // 16)
        .manager.refusal_reason(768)
    )


def test_a_cache_that_grows_by_one_row_copies_itself_for_every_token():
    kv = config.KV(layout=config.KVLayout.contiguous, growth_step=1)
    assert slots_for(kv, [10, 300]) == 310
    harness = Harness(contiguous_factory(growth_step=1))
    cache = harness.kv_cache.manager
    manager = contiguous_factory(growth_step=3).create(SHAPES, 1).manager
    assert manager.capacity_tokens == 15  # of 16
    harness.join("1", 10, 20)
    harness.step({"1": 10})
    for held in (11, 12, 13):
        harness.step({"1": 1})
        assert cache.reserved_bytes == held * TOKEN_BYTES
    assert cache.counters()["kv.moves"] == 3
    assert cache.counters()["kv.bytes_copied"] == (10 + 11 + 12) * TOKEN_BYTES


@pytest.mark.parametrize(
    ("kind", "slots_held"),
    # A row of the rectangle is as wide as the longest's; a cache is its request's own.
    [
        (PADDED, 512 + 512),
        (CONTIGUOUS, 256 + 512),
        (contiguous_factory(set_aside=600), 768 + 768),
    ],
)
def test_a_released_request_s_held_and_filled_slots_are_counted(kind, slots_held):
    harness = Harness(kind)
    for name, prompt in (("1", 10), ("2", 300)):
        harness.join(name, prompt, 9)
        harness.step({name: prompt})
    harness.leave("1")
    harness.leave("2")
    cache = harness.kv_cache.manager
    assert cache.counters()["kv.slots_filled"] == 10 + 300
    assert cache.counters()["kv.slots_held"] == slots_held
    cache.reset_counters()
    assert cache.counters()["kv.slots_held"] == 0


def test_used_tokens_remember_their_peak():
    used = ComputedTokenCount()
    used.update("a", 5)
    used.update("b", 3)
    used.update("a", 6)
    used.remove("b")
    used.remove("b")
    assert used.peak == 9
    used.reset()
    assert used.peak == 6


class Harness:
    """Drives a layout without a model: a token's key says whose it is and where it lies."""

    def __init__(self, kind, capacity=1 << 14):
        self.kv_cache = kind.create(SHAPES, capacity // 16)
        self.states = {}
        self.builder = InputBuilder(self.kv_cache.manager)

    def join(self, name, prompt, output):
        state = RequestState(Request(name, (1,) * prompt))
        if self.kv_cache.manager.reserve(state, prompt + output) is None:
            return False
        self.states[name] = state
        return True

    def leave(self, name):
        del self.states[name]
        self.kv_cache.manager.release(name)
        self.kv_cache.manager.check(set(self.states))

    def step(self, counts):
        chunks = []
        for name, count in counts.items():
            state = self.states[name]
            while state.num_tokens < state.num_computed_tokens + count:
                state.token_ids.append(1)
            chunks.append(ScheduledChunk(state, state.num_computed_tokens, count))
        batch = self.builder.build(SchedulerOutput(tuple(chunks)))
        computed, step = self.kv_cache.prepare_step(batch)
        attention = step.metadata
        owner = np.repeat([float(name) for name in counts], list(counts.values()))
        rows = getattr(attention, "target", np.arange(batch.total_q))
        assert (computed.positions[rows] == batch.positions).all()
        assert len(computed.logit_rows) == len(batch.logit_rows)
        assert (computed.positions[computed.logit_rows] == batch.positions[batch.logit_rows]).all()
        for layer, shape in enumerate(SHAPES):
            k = np.full((computed.total_q, shape.num_kv_heads, shape.key_dim), 9e9, np.float32)
            v = np.full((computed.total_q, shape.num_kv_heads, shape.value_dim), 9e9, np.float32)
            k[rows] = (1000 * owner + batch.positions)[:, None, None]
            v[rows] = -(1000 * owner + batch.positions)[:, None, None]
            attention.write(layer, k, v)
        for chunk in chunks:
            chunk.state.num_computed_tokens += chunk.num_tokens
            self.kv_cache.manager.cache_blocks(chunk.state)
        self.check()
        return computed, attention

    def check(self):
        self.kv_cache.manager.check(set(self.states))
        for name, state in self.states.items():
            length = state.num_computed_tokens
            if not length:
                continue
            expected = 1000 * float(name) + np.arange(length)
            for layer in range(len(SHAPES)):
                for sign, view in zip((1, -1), self.rows(name, layer, length), strict=True):
                    assert np.isfinite(view).all() and abs(view).max() < 9e9
                    assert (view == sign * expected[None, :, None]).all()

    def rows(self, name, layer, length):
        cache = self.kv_cache.manager
        number = int(cache.table(name).block_ids[0])
        is_padded = hasattr(cache, "dense")
        layers = (cache.dense if is_padded else cache.rows[number]).layer(layer)
        views = [np.asarray(array.parts[0]) for array in layers]
        if is_padded:
            (row,) = (r for r in cache.rows if r.row_id == number)
            return [view[row.place, :, row.pad : row.pad + length] for view in views]
        return [view[0, :, :length] for view in views]


def test_the_case_study_is_reported_to_waste_61_percent():
    """30,000 + 5,000 + 10 tokens padded to 90,000, the article's figure, as a run counts it."""
    harness = Harness(PADDED, capacity=1 << 17)
    lengths = {"0": 30_000, "1": 5_000, "2": 10}
    assert all(harness.join(name, length, 1) for name, length in lengths.items())
    harness.step(lengths)
    waste = harness.kv_cache.manager.counters()["padding.waste_pct"]
    assert waste == pytest.approx(100 * (1 - 35_010 / 90_000))
    assert round(waste) == 61


def test_a_token_that_requests_share_is_not_used_twice():
    used = ComputedTokenCount()
    used.update("a", 24, reserved=32)
    used.update("b", 24, reserved=32)
    assert used.peak == 32


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["padded", "static", "contiguous"]))
def test_tokens_survive_every_join_leave_and_growth(data, kind):
    kinds = {
        "padded": PADDED,
        "static": STATIC,
        "contiguous": CONTIGUOUS,
    }
    harness, names = Harness(kinds[kind]), iter(range(1, 100))
    left = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and len(harness.states) < 4:
            name, prompt = str(next(names)), data.draw(st.integers(1, 300))
            output = data.draw(st.integers(0, 300))
            if harness.join(name, prompt, output):
                left[name] = prompt + output
        if not harness.states:
            continue
        if data.draw(st.integers(0, 3)) == 0:
            harness.leave(data.draw(st.sampled_from(sorted(harness.states))))
        able = [n for n, s in harness.states.items() if s.num_computed_tokens < left[n]]
        counts = {
            n: data.draw(st.integers(1, left[n] - harness.states[n].num_computed_tokens))
            for n in able
            if data.draw(st.booleans())
        }
        if counts:
            harness.step(counts)
    for name in list(harness.states):
        harness.leave(name)
    assert harness.kv_cache.manager.reserved_bytes == 0


def test_rows_are_left_padded_to_the_longest_and_trimmed_when_it_leaves():
    harness = Harness(PADDED)
    for name, prompt in (("1", 30), ("2", 5)):
        assert harness.join(name, prompt, 20)
    harness.step({"1": 30, "2": 5})
    assert [(r.pad, r.length) for r in harness.kv_cache.manager.rows] == [(0, 30), (25, 5)]
    _, step = harness.step({"1": 1, "2": 1})
    assert (step.columns, step.empty_columns) == (62, 25)
    harness.join("3", 2, 4)
    harness.step({"3": 2})
    assert [r.pad for r in harness.kv_cache.manager.rows] == [0, 25, 29]
    harness.leave("1")
    harness.step({"2": 1, "3": 1})
    assert [(r.pad, r.length) for r in harness.kv_cache.manager.rows] == [(0, 7), (4, 3)]
    counters = harness.kv_cache.manager.counters()
    # Joined beside 31 and 6 tokens, then moved 6 and 2.
    assert counters["kv.bytes_copied"] == (31 + 6 + 6 + 2) * TOKEN_BYTES
    assert counters["kv.moves"] == 2
    # The prompt of "3" alone reads no padding.
    read, empty = 60 + 62 + 2 + 14, 25 + 25 + 0 + 4
    assert counters["padding.waste_pct"] == pytest.approx(100 * empty / read)


def test_a_rectangle_is_promised_for_the_longest_prompt_and_the_longest_output():
    harness = Harness(STATIC, capacity=1024)
    assert harness.join("1", 250, 6)  # 256 columns
    assert not harness.join("2", 1, 300)  # 550 columns in two rows would be 1,536
    assert harness.join("3", 1, 200)  # 512 columns in two rows
    assert not harness.join("4", 1, 1)
    contiguous = Harness(CONTIGUOUS, capacity=1024)
    assert contiguous.join("1", 250, 6) and contiguous.join("2", 1, 300)
    assert contiguous.join("4", 1, 1) and not contiguous.join("5", 1, 1)


@pytest.mark.parametrize("kind", [PADDED, CONTIGUOUS])
def test_growth_keeps_the_stored_tokens_and_counts_its_copy(kind):
    harness = Harness(kind)
    harness.join("1", 250, 300)
    harness.step({"1": 250})
    harness.step({"1": 7})
    counters = harness.kv_cache.manager.counters()
    assert (counters["kv.moves"], counters["kv.bytes_copied"]) == (1, 250 * TOKEN_BYTES)
    harness.step({"1": 255})
    assert harness.kv_cache.manager.counters()["kv.moves"] == 1
    assert harness.kv_cache.manager.reserved_bytes == 512 * TOKEN_BYTES
