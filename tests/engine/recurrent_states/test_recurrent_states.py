"""Models with recurrent states give plain mlx_lm's tokens in every way of serving."""

import itertools

import numpy as np
import pytest
from architectures import settings
from small_models import build_model_dir

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.recurrent_states import state_arrays

TOKENS = 16
# Short states, a state beside attention in one layer, and a state that two modules share.
MODELS = ("lfm2", "falcon_h1", "rwkv7")
BLOCKLESS = {"attention": config.Attention(backend="sdpa"), "budget": config.Budget(blocks=400)}
SPLIT = {"composition": config.Composition.split}
WAYS = {
    "chunked": ({}, {}),
    "optimistic": (
        {"reservation": config.Reservation.optimistic, "watermark": 0},
        {"budget": config.Budget(blocks=11)},
    ),
    "split": ({"order": config.Order.prefill_first, **SPLIT}, {}),
    "overlap": ({}, {"pipeline": config.Pipeline.overlap}),
    "overlap in a thread": (
        {},
        {"pipeline": config.Pipeline.overlap, "attention": config.Attention()},
    ),
    "padded rows": ({}, {"decode_shape": config.DecodeShape.fixed}),
    "contiguous": ({}, {"name": "contiguous", "layout": "contiguous", **BLOCKLESS}),
    "padded": (SPLIT, {"name": "padded", "layout": "padded", **BLOCKLESS}),
    "static": (
        {"admission": config.Admission.static, "order": config.Order.prefill_first, **SPLIT},
        {"name": "naive", "layout": "padded", **BLOCKLESS},
    ),
    "window": ({}, {"speculation": config.Speculation.ngram}),
    "staircase": (
        {},
        {
            "speculation": config.Speculation.ngram,
            "drafts": config.Drafts(verification=config.Verification.staircase),
        },
    ),
    "hash": ({}, {"prefix_cache": config.PrefixCache.hash, "state_snapshots": 8}),
    "radix": ({}, {"prefix_cache": config.PrefixCache.radix, "state_snapshots": 8}),
}


def prompts():
    """Ragged prompts; the first repeats itself, for n-grams, and begins the last."""
    rng = np.random.default_rng(1)
    first = (7, 8, 9) * 9
    drawn = [tuple(int(t) for t in rng.integers(0, 126, n)) for n in (5, 33, 1)]
    return [first, *drawn, (*first, *drawn[0])]


def options(way, **changes):
    scheduling, engine = WAYS[way]
    engine = dict(engine)
    layout = config.KVLayout(engine.pop("layout", "paged"))
    snapshots = engine.pop("state_snapshots", None)
    return config.Engine(
        **{
            "scheduler": config.Scheduler(max_num_seqs=3, max_num_batched_tokens=12, **scheduling),
            "kv": config.KV(block_size=8, layout=layout, state_snapshots=snapshots),
            "budget": config.Budget(blocks=64),
            "attention": config.Attention(backend="gather"),
            **engine,
            **changes,
        }
    )


class Oracle:
    """Proposes the right tokens, of which every third is made wrong."""

    name = "oracle"

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, draft_requests):
        drafts = []
        for request in draft_requests:
            done = request.state.num_output_tokens
            right = self.tokens[int(request.state.request_id)][done : done + request.limit]
            drafts.append(
                tuple((t + 1) % 128 if (done + i) % 3 == 0 else t for i, t in enumerate(right))
            )
        return drafts


def serve(engine, preempt_at=(), max_tokens=TOKENS):
    """The tokens of each prompt. Before the steps ``preempt_at`` two requests are preempted."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens = [[] for _ in prompts()]
    for index, prompt in enumerate(prompts()):
        engine.submit(Request(str(index), prompt, params))
    step = 0
    while engine.has_work():
        step += 1
        if step in preempt_at:
            engine._scheduler.preempt("0")
            engine._scheduler.preempt("2")
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.request_id)].append(event.token)
        engine.check()
    return tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A function from architecture to its model directory, built once."""
    root = tmp_path_factory.mktemp("recurrent")

    def find(name):
        path = root / name
        return path if path.is_dir() else build_model_dir(path, settings(name))

    return find


@pytest.fixture(scope="module")
def plain(directory):
    """A function from architecture to the tokens of plain mlx_lm's own loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    known = {}

    def tokens(name):
        if name not in known:
            model = load_model(directory(name))[0]
            steps = [generate_step(mx.array(p), model, max_tokens=TOKENS) for p in prompts()]
            known[name] = [[int(token) for token, _ in one] for one in steps]
        return known[name]

    return tokens


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_plain_mlx_lm(way, directory, plain):
    engine = create(options(way), directory("lfm2"))
    if way in ("window", "staircase"):
        engine._loop._speculation._proposer = Oracle(plain("lfm2"))
    assert serve(engine) == plain("lfm2")
    counters = engine.counters()
    assert counters["state_slots.peak"] == 3
    if way == "optimistic":
        assert counters["preemptions"] > 0
    if way in ("window", "staircase"):
        assert 0 < counters["spec.accepted"] < counters["spec.drafted"]
    if way in ("hash", "radix"):
        assert counters["prefix.hit_tokens"] > 0
        assert counters["state_snapshots.restored"] > 0
        engine.clear_cache()
        counters = engine.counters()
    assert counters["state_slots.allocated"] == counters["state_slots.freed"] > 0
    assert counters.get("blocks.allocated") == counters.get("blocks.freed")


@pytest.mark.parametrize("name", MODELS[1:])
@pytest.mark.parametrize("way", ["overlap", "window", "hash"])
def test_other_kinds_of_states(name, way, directory, plain):
    engine = create(options(way), directory(name))
    if way == "window":
        engine._loop._speculation._proposer = Oracle(plain(name))
    assert serve(engine) == plain(name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["chunked", "radix"])
def test_preempted_requests_get_the_same_tokens(name, way, directory, plain):
    engine = create(options(way), directory(name))
    assert serve(engine, preempt_at=(2, 5, 11)) == plain(name)
    assert engine.counters()["preemptions"] >= 4


def test_prefixes_are_reused_when_the_engine_is_warm(directory, plain):
    engine = create(
        options("hash", kv=config.KV(block_size=8, state_snapshots=16)), directory("lfm2")
    )
    assert serve(engine) == plain("lfm2")
    engine.reset_counters()
    assert serve(engine) == plain("lfm2")
    counters = engine.counters()
    # As in a model without states: all full blocks before the last token of each prompt.
    assert counters["prefix.hit_tokens"] == sum((len(p) - 1) // 8 * 8 for p in prompts())
    assert counters["state_snapshots.restored"] == 3  # two prompts have no full block
    engine.clear_cache()
    engine.reset_counters()
    assert serve(engine) == plain("lfm2")


def test_snapshots_go_when_there_are_too_many(directory, plain):
    engine = create(
        options("radix", kv=config.KV(block_size=8, state_snapshots=1)), directory("lfm2")
    )
    for _ in range(2):
        assert serve(engine) == plain("lfm2")
    assert engine.counters()["state_snapshots.evicted"] > 0


def rotate(slots):
    return slots[1:] + slots[:1]


def test_a_state_read_from_a_neighbour_is_refused_at_load(directory, monkeypatch):
    gather = state_arrays.StateMemory._gather
    monkeypatch.setattr(
        state_arrays.StateMemory, "_gather", lambda self, slots: gather(self, rotate(slots))
    )
    with pytest.raises(EngineError, match="refused by the self-test: its logits differ"):
        create(options("chunked"), directory("lfm2"))


def test_a_state_written_by_a_neighbour_is_refused_at_load(directory, monkeypatch):
    write = state_arrays.StateGroup.write

    def write_rotated(self, part, layer, entry, state):
        import mlx.core as mx

        write(self, part, layer, entry, mx.roll(state, 1, axis=0))

    monkeypatch.setattr(state_arrays.StateGroup, "write", write_rotated)
    with pytest.raises(EngineError, match="refused by the self-test: its logits differ"):
        create(options("chunked"), directory("lfm2"))


def test_a_state_of_other_tokens_is_an_error(directory):
    engine = create(options("chunked"), directory("lfm2"))
    engine.submit(Request("a", prompts()[0], SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    engine._scheduler._live["a"].num_computed_tokens -= 1
    with pytest.raises(EngineError, match=r"request a: .* consumed 12 tokens, .* at token 11$"):
        engine.step()
    assert not engine.has_work()
    engine.check()


def test_the_budget_counts_the_states(directory):
    engine = create(options("hash"), directory("lfm2"))  # 3 requests and 8 snapshots
    assert "11 state slots and a batch of 3 7.0 KiB" in engine.notes["budget"]
    counters = engine.counters()
    assert (counters["state_slots.total"], counters["state_slot_bytes"]) == (11, 512)
    engine.submit(Request("a", prompts()[0], SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    held = engine.kv_bytes()
    assert held.reserved - held.reserved // 2048 * 2048 == 512  # blocks are 2 KiB here
    assert 512 < held.used <= held.reserved
    blocks = counters["blocks.total"] * counters["kv_block_bytes"]
    assert held.total == blocks + 11 * 512


def test_the_blocks_of_requests_with_states_are_traced(directory):
    engine = create(options("hash"), directory("lfm2"))
    trace = engine.trace_steps(1_000, itertools.count().__next__)
    for name in "ab":
        engine.submit(Request(name, prompts()[0], SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    report = trace.report()
    assert report["num_blocks"] == engine.counters()["blocks.total"] + 1  # the null block
    assert {index for step in report["steps"] for index, *_ in step["blocks"]} == {0, 1}
    assert any(step["released"] for step in report["steps"])


def test_a_draft_model_with_states_is_refused(directory):
    drafting = options(
        "chunked", speculation=config.Speculation.draft, drafts=config.Drafts(draft_layers=2)
    )
    reason = r"engine.speculation=draft draft_layers=2: .* has recurrent states"
    with pytest.raises(EngineError, match=reason):
        create(drafting, directory("lfm2"))
