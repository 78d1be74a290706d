"""Pools for the layers of each sliding window: the same tokens, fewer bytes, and no leak."""

import functools

import numpy as np
import pytest
from architectures import settings
from small_models import CONFIGS, build_model_dir
from stub_engine import VOCAB, Adversary, StubModel, make_cache, make_engine, request, run, solo

from labkit import config
from labkit.engine import Request, SamplingParams, create, memory_budget
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.window_pools import WindowBlocks, WindowedKVCacheManager
from labkit.engine.memory_budget import model_footprint
from labkit.engine.memory_budget.required_kv_slots import StepLimits, split_blocks
from labkit.engine.request import RequestState
from labkit.models.synthetic.synthetic_model import build

WINDOW = CONFIGS["gemma3"]["sliding_window"]  # of two of the three layers
SIZE = 8  # tokens per block
REPEATING = tuple([5, 17, 99, 3, 42] * 9)
OPTIMISTIC = {"reservation": config.Reservation.optimistic, "watermark": 0}
SPLIT = {"composition": config.Composition.split}
PREFILL_FIRST = {"order": config.Order.prefill_first}


def options(pools=True, blocks=256, scheduler=None, attention=None, **engine):
    scheduling = {"max_num_seqs": 4, "max_num_batched_tokens": 24} | (scheduler or {})
    return config.Engine(
        name="paged",
        kv=config.KV(block_size=SIZE, window_pools=pools),
        scheduler=config.Scheduler(**scheduling),
        budget=config.Budget(blocks=blocks),
        attention=config.Attention(**attention or {}),
        **engine,
    )


def requests(max_tokens=30):
    rng = np.random.default_rng(3)
    prompts = [tuple(map(int, rng.integers(0, 298, n))) for n in (70, 5, 33, 1, 16, 48)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(str(i), p, params) for i, p in enumerate([*prompts, REPEATING])]


def serve(engine, new_requests):
    """The tokens of each request, and the largest ``reserved_bytes``."""
    tokens, _ = run(engine, new_requests)
    assert engine._cache.reserved_bytes == 0
    return tokens


@pytest.fixture(scope="module")
def one_pool(model_dir):
    """Tokens and counters without window pools."""
    engine = create(options(pools=False), model_dir("gemma3"))
    return serve(engine, requests()), engine.counters()


CASES = {
    "plain": {},
    "chunked": {"scheduler": {"chunk": 5}},
    "split": {"scheduler": SPLIT},
    "prefill_first": {"scheduler": PREFILL_FIRST},
    "preempted": {"blocks": 24, "scheduler": OPTIMISTIC},
    "overlap": {"pipeline": config.Pipeline.overlap},
    "overlap_preempted": {
        "blocks": 24,
        "scheduler": {**OPTIMISTIC, "chunk": 7},
        "pipeline": config.Pipeline.overlap,
    },
    "padded_decodes": {"decode_shape": config.DecodeShape.fixed},
    "ngram": {"speculation": config.Speculation.ngram},
    "staircase": {
        "speculation": config.Speculation.random,
        "drafts": config.Drafts(num_draft_tokens=6, verification=config.Verification.staircase),
    },
    "masked": {"attention": {"window_skip": False}},
    "gather": {"attention": {"backend": "gather"}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_one_pool(case, one_pool, model_dir):
    engine = create(options(**CASES[case]), model_dir("gemma3"))
    assert serve(engine, requests()) == one_pool[0]
    counters = engine.counters()
    assert counters["window_pools.freed_blocks"] > 0
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    assert 0 < counters["kv_used_bytes"] <= counters["peak_kv_bytes"]
    assert (counters.get("preemptions", 0) > 0) == ("preempted" in case)
    assert (counters.get("spec.drafted", 0) > 0) == (case in ("ngram", "staircase"))


def test_the_tokens_are_those_of_plain_mlx_lm(one_pool, model_dir, plain_greedy):
    for new in requests():
        expected = plain_greedy("gemma3", new.prompt_token_ids, new.params.max_tokens)
        assert one_pool[0][new.request_id] == expected


def test_a_request_holds_its_windows_and_the_tokens_of_a_step(model_dir):
    """Bytes are counted in all layers: one sees everything, two see a window."""
    engine = create(options(scheduler={"chunk": 16}), model_dir("gemma3"))
    layer_block = SIZE * 2 * 2 * CONFIGS["gemma3"]["head_dim"] * 4  # two KV heads, keys and values
    engine.submit(Request("a", REPEATING * 4, SamplingParams(max_tokens=40, ignore_eos=True)))
    held = []
    while engine.has_work():
        engine.step()
        held.append(engine._cache.reserved_bytes)
    num_tokens = len(REPEATING) * 4 + 39
    full = -(-num_tokens // SIZE)
    # At the end the window covers 11 tokens of at most 3 blocks of 8.
    assert full * layer_block < held[-2] <= (full + 2 * 3) * layer_block
    most = -(-(WINDOW + 16) // SIZE) + 1
    assert max(held) <= (full + 2 * most) * layer_block < 3 * full * layer_block / 2
    counters = engine.counters()
    total = counters["blocks.total"] + 2 * counters["window_pools.total_blocks"]
    assert max(held) <= engine.kv_bytes().total == total * layer_block
    assert counters["window_pools.peak_blocks"] <= most
    assert counters["peak_kv_bytes"] >= max(held) > 0


def test_the_same_memory_holds_more_requests(model_dir):
    """Four requests of 28 blocks in the memory of 64 blocks of all layers."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    counters = {}
    for pools in (False, True):
        engine = create(options(pools, blocks=64), model_dir("gemma3"))
        serve(engine, [Request(str(i), (7, i, *REPEATING) * 4 + (5,), params) for i in range(4)])
        counters[pools] = engine.counters()
    assert counters[False]["requests.most_running"] == 2
    assert counters[True]["requests.most_running"] == 4
    whole = counters[False]["blocks.total"] * counters[False]["kv_block_bytes"]
    assert counters[True]["peak_kv_bytes"] <= whole


def test_what_window_pools_do_not_serve_is_refused_by_name(model_dir):
    with pytest.raises(EngineError, match=r"engine\.kv\.window_pools=true: no layer of .*qwen3"):
        create(options(), model_dir("qwen3"))
    for refused in (
        {"prefix_cache": config.PrefixCache.hash},
        {"speculation": config.Speculation.draft},
    ):
        with pytest.raises(config.ConfigError, match="window_pools"):
            options(**refused)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3n", "recurrent_gemma"])
def test_other_kinds_of_layers_beside_windows(name, tmp_path):
    """Sinks on MLX; layers that share keys; recurrent states, and no layer without a window."""
    path, tokens = build_model_dir(tmp_path / name, settings(name)), {}
    rng = np.random.default_rng(2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [tuple(map(int, rng.integers(0, 126, n))) for n in (40, 3, 21)]
    for pools in (False, True):
        engine = create(options(pools), path)
        tokens[pools] = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts)])
    assert tokens[False] == tokens[True]
    assert engine.counters()["window_pools.freed_blocks"] > 0


def test_a_synthetic_model_with_windows_frees_what_they_no_longer_see():
    shape = config.ModelShape(
        hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=512,
        intermediate_size=64, sliding_window=16,
    )  # fmt: skip
    path, tokens = build(shape, seed=0, name="window"), {}
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for pools in (False, True):
        engine = create(options(pools), path)
        tokens[pools] = serve(engine, [Request("a", tuple(range(30)), params)])
    assert tokens[False] == tokens[True] and len(set(tokens[True]["a"])) > 20
    assert engine.notes["forward"] == "numpy"
    # One layer of 89 tokens, three of the last 16 and a chunk.
    layer_block = SIZE * 2 * 32 * 4
    assert engine.counters()["kv_block_bytes"] == layer_block
    assert engine.counters()["peak_kv_bytes"] <= (12 + 3 * 6) * layer_block
    planned = model_footprint.from_shape(shape, "window")
    written = model_footprint.from_directory(path)
    in_full = {None: None, planned.windows: engine.counters()["blocks.total"] + 1}
    for footprint in (planned, written):
        assert memory_budget.plan(options(), footprint).full_blocks == in_full[footprint.windows]
    assert planned.kv_bytes_per_token == written.kv_bytes_per_token == 4 * layer_block / SIZE
    assert (planned.weights, planned.weight_bytes) == (written.weights, written.weight_bytes)


@pytest.mark.parametrize("other", [{"num_layers": 1}, {"full_attention_interval": 2}])
def test_a_synthetic_model_without_a_layer_for_a_window_is_refused(other):
    with pytest.raises(config.ConfigError, match=r"model\.shape\.sliding_window=16"):
        config.ModelShape(sliding_window=16, **other)


# The stub: a layer without a window, and one that sees only the last keys of it.


class WindowedStub(StubModel):
    """Also writes to the window's blocks, and checks what each query sees in them."""

    def __init__(self, num_blocks, block_size, window):
        super().__init__(num_blocks, block_size)
        self.windowed = StubModel(num_blocks, block_size).slots
        self.window = window

    def __call__(self, batch):
        logits = super().__call__(batch)
        self.windowed[0] = -1000
        (tables,) = batch.window_tables
        segment = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.cu_seqlens_q))
        positions, size = batch.positions, self.slots.shape[1]
        blocks = tables[segment, positions // size]
        assert ((blocks == 0) == (np.arange(len(blocks)) >= batch.num_tokens)).all()
        self.windowed[blocks, positions % size] = batch.tokens
        for row in range(batch.num_tokens):
            seen = np.arange(max(0, positions[row] + 1 - self.window), positions[row] + 1)
            block, offset = seen // size, seen % size
            wanted = self.slots[batch.block_tables[segment[row], block], offset]
            assert (self.windowed[tables[segment[row], block], offset] == wanted).all()
        return logits


def windowed_engine(num_blocks=12, window=6, window_blocks=40, **strategy):
    drafts = strategy.get("num_drafts", 3) if strategy.get("proposer") else 0
    group = WindowBlocks(BlockPool(window_blocks, 4), window, 100)
    limits = StepLimits(4, strategy.get("max_num_batched_tokens", 8), drafts)
    cache = WindowedKVCacheManager(make_cache(num_blocks, 4), [group], limits)
    model = WindowedStub(max(num_blocks, window_blocks), 4, window)
    strategy = {"max_num_seqs": 4, "max_num_batched_tokens": 8, **strategy}
    return make_engine(num_blocks, 4, cache=cache, model=model, **strategy)[0], group


STRATEGIES = {
    "plain": {},
    "optimistic": OPTIMISTIC,
    "overlap": {**OPTIMISTIC, "pipeline": "overlap"},
    "bucketed": {**OPTIMISTIC, "pipeline": "overlap", "shape": "bucketed"},
    "split": {**OPTIMISTIC, "composition": config.Composition.split},
    "window": {**OPTIMISTIC, "proposer": Adversary(1)},
    "staircase": {**OPTIMISTIC, "proposer": Adversary(2), "cut": "staircase", "num_drafts": 5},
    # Blocks are reserved to a request's end, so drafts may run far ahead of the chunk.
    "full_drafts": {"proposer": Adversary(3), "num_drafts": 6},
    # The window's pool is so small that it, not the full one, makes requests wait.
    "scarce": {**OPTIMISTIC, "window_blocks": 7},
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("window", [1, 6, 8])
def test_random_requests_aborts_and_preemptions_leak_nothing(name, window):
    rng = np.random.default_rng(window)
    engine, group = windowed_engine(window=window, chunk=6, **STRATEGIES[name])
    made, tokens, aborted, num_steps = {}, {}, set(), 0
    while len(made) < 60 or engine.has_work():
        num_steps += 1
        assert num_steps < 5000, "livelock"
        if len(made) < 60 and rng.random() < 0.5:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 25)).tolist()
            new = request(f"r{len(made)}", prompt, int(rng.integers(1, 15)))
            made[new.request_id] = new
            engine.submit(new)
        if rng.random() < 0.05 and made:
            aborted.add(f"r{rng.integers(len(made))}")
            engine.abort(sorted(aborted)[-1])
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
    for key in set(made) - aborted:
        assert tokens[key] == solo(made[key].prompt_token_ids, made[key].params.max_tokens)
    counters = engine.counters()
    assert group.pool.num_used == 0 and group.pool.allocated == group.pool.freed > 0
    assert counters["window_pools.freed_blocks"] > 0
    assert (counters.get("preemptions", 0) > 0) == ("reservation" in STRATEGIES[name])


def test_a_block_freed_too_early_is_caught(monkeypatch):
    """Seeded bug: the window is one token too short where that crosses a block."""
    right = WindowBlocks.slide
    monkeypatch.setattr(
        WindowBlocks, "slide", lambda self, name, count: right(self, name, count + 1)
    )
    engine, _ = windowed_engine()
    with pytest.raises(AssertionError):
        run(engine, [request("a", range(1, 20), 12)])


def test_a_block_never_freed_is_caught():
    engine, group = windowed_engine()
    group.release = functools.partial(group._tables.pop)
    with pytest.raises(AssertionError):
        run(engine, [request("a", range(1, 20), 12), request("b", range(1, 20), 20)])


def test_slide_frees_exactly_the_blocks_that_no_later_query_sees():
    for window in range(1, 14):
        group = WindowBlocks(BlockPool(20, 4), window, 1)
        group.open("a")
        group.grow("a", 50)
        for computed in range(51):
            group.slide("a", computed)
            seen = {position // 4 for position in range(max(0, computed - window + 1), 50)}
            held = set(np.flatnonzero(group.table("a")).tolist())
            assert held == seen | {12}
            assert group.num_held_tokens("a", computed) == computed - 4 * (13 - len(held))
            group.check({"a"})


def test_tables_are_immutable_and_kept_while_nothing_changes():
    group = WindowBlocks(BlockPool(20, 4), 5, 10)
    manager = WindowedKVCacheManager(make_cache(20, 4), [group], StepLimits(1, 12))
    state = RequestState(Request("a", tuple(range(30))))
    manager.reserve(state, 30)
    assert manager.grow("a", 10)
    first = manager.table("a")
    assert manager.grow("a", 12) and manager.table("a") is first
    before = first.windows[0].tolist()
    state.num_computed_tokens = 12
    manager.cache_blocks(state)
    assert manager.table("a") is not first and first.windows[0].tolist() == before
    assert manager.table("a").windows[0].tolist() == [0, 0, before[2]]
    assert manager.reserved_bytes == 8 * 100 + 10
    assert manager.counters()["peak_kv_bytes"] == 8 * 100 + 3 * 10


@pytest.mark.parametrize("full_bytes", [0, 1, 5])
def test_the_groups_share_the_memory_of_whole_blocks(full_bytes):
    limits = StepLimits(num_seqs=2, num_tokens=16)
    most = limits.window_blocks(8, 4)
    for num_blocks in (2, 9, 30, 100):
        full, (window,) = split_blocks(num_blocks, full_bytes, [(3, most)])
        memory = num_blocks * (full_bytes + 3)
        assert num_blocks <= full and window <= min(full, most + 1)
        assert full * full_bytes + window * 3 <= memory
        if full_bytes:  # one more block would not fit
            assert (full + 1) * full_bytes + min(full + 1, most + 1) * 3 > memory
