"""``engine=mlx_lm``: plain mlx_lm's tokens, one cap on what is in flight, honest counts."""

import dataclasses
import shutil
import time

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.base import NO_TOKEN, EngineError, InvalidLogitsError, KVBytes, Observable
from labkit.engine.mlx_lm.loading import load
from labkit.engine.mlx_lm.sampling import sampler_of
from labkit.engine.mlx_lm.work import surplus

LENGTHS = (3, 8, 17, 40, 1, 33, 16, 15)
CAP = 3


def prompts(lengths=LENGTHS, seed=1):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, 298, n)) for n in lengths]


def options(chunk=None, cap=CAP):
    return config.Engine(
        name="mlx_lm",
        scheduler=config.Scheduler(max_num_seqs=cap, chunk=chunk),
    )


def requests(**params):
    chosen = SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | params)
    return [Request(str(i), p, chosen) for i, p in enumerate(prompts())]


def in_flight(engine):
    generator = engine._generator
    return sum(
        map(
            len,
            (
                generator._unprocessed_sequences,
                generator._prompt_batch.uids,
                generator._generation_batch.uids,
            ),
        )
    )


def serve(engine, asked):
    tokens, last, most = {}, {}, 0
    for request in asked:
        engine.submit(request)
    while engine.has_work():
        for event in engine.step():
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                assert event.request_id not in last
                last[event.request_id] = event
        most = max(most, in_flight(engine))
    assert most <= CAP
    return tokens, last


@pytest.fixture(scope="module")
def shared(model_dir):
    engines = {}

    def find(name="qwen3", chunk=None):
        if (name, chunk) not in engines:
            engines[name, chunk] = create(options(chunk), model_dir(name))
        engine = engines[name, chunk]
        assert not engine.has_work()
        engine.reset_counters()
        return engine

    yield find
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize(("name", "chunk"), [("qwen3", None), ("llama", 5), ("gemma3", None)])
def test_greedy_tokens_equal_plain_mlx_lm(name, chunk, shared, plain_greedy):
    engine = shared(name, chunk)
    tokens, last = serve(engine, requests())
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy(name, prompt, 12), f"prompt {i}"
        assert last[str(i)].finish_reason == "length"


def test_the_counters_say_what_was_computed(shared):
    engine = shared("llama", 5)
    start = time.perf_counter()
    serve(engine, requests())
    wall_ms = (time.perf_counter() - start) * 1e3
    counters = engine.counters()
    assert counters["engine.mlx_lm"] == counters["steps.total"] > 0
    assert counters["tokens.prefill"] == sum(LENGTHS)
    assert counters["tokens.sampled"] == counters["tokens.decode"] == 12 * len(LENGTHS)
    assert counters["tokens.discarded"] == len(LENGTHS)
    assert counters["requests.submitted"] == counters["requests.finished"] == len(LENGTHS)
    assert counters["requests.aborted"] == counters["requests.refused"] == 0
    assert counters["blas.stock"] == 1
    parts = ("tokens.prefill", "tokens.decode", "tokens.padded")
    assert counters["tokens.computed"] == sum(counters[part] for part in parts)
    assert counters["step_ms"] == pytest.approx(counters["device_ms"] + counters["host_ms"])
    # Under 3 % with models and machines of use; this model is a toy and the machine busy.
    assert 0 < counters["host_ms"] < 0.1 * wall_ms
    engine.reset_counters()
    assert engine.counters()["steps.total"] == engine.counters()["peak_kv_bytes"] == 0


@pytest.mark.parametrize("chunk", [None, 5])
def test_padding_is_counted_as_the_generator_computes_it(chunk, shared, monkeypatch):
    """Against the shapes that the model is really given."""
    engine = shared("llama", chunk)
    model = type(engine._loaded.model)
    shapes, call = [], model.__call__

    def spy(self, inputs, *args, **kwargs):
        shapes.append(inputs.shape)
        return call(self, inputs, *args, **kwargs)

    monkeypatch.setattr(model, "__call__", spy)
    serve(engine, requests())
    counters = engine.counters()
    assert counters["tokens.padded"] > 0 and counters["kv.padded_slots"] > 0
    assert counters["tokens.computed"] == sum(rows * columns for rows, columns in shapes)
    assert max(columns for _, columns in shapes) == (chunk or 39)


def test_one_request_alone_has_no_padding(shared):
    engine = shared()
    serve(engine, requests()[3:4])
    assert engine.counters()["tokens.padded"] == engine.counters()["kv.padded_slots"] == 0


def test_surplus_is_what_padding_to_the_longest_adds():
    assert surplus([5, 1, 3]) == 6
    assert surplus([]) == surplus([7]) == 0


def test_peak_kv_bytes_is_what_the_caches_hold_at_most(shared):
    engine = shared()
    held = []
    for request in requests():
        engine.submit(request)
    while engine.has_work():
        engine.step()
        held.append(engine._generator.prompt_cache_nbytes)
    assert engine.counters()["peak_kv_bytes"] == max(held) > 0


def test_the_kv_bytes_are_those_of_the_model(shared):
    """3 layers, keys and values, 2 heads of 64 float32; gemma3: two layers of 3 see 11 tokens."""
    layer = 2 * 2 * 64 * 4
    for name, expected in (("qwen3", 3 * 33 * layer), ("gemma3", (33 + 2 * 11) * layer)):
        engine = shared(name)
        assert isinstance(engine, Observable)
        request = requests()[5]
        engine.submit(request)
        assert not engine.is_running("5")
        while not engine.step():
            assert engine.is_running("5") and not engine.is_running("4")
        seen = engine.kv_bytes()
        assert seen.used == expected + (3 if name == "qwen3" else 1) * layer
        assert seen.held >= seen.used
        engine.abort("5")
        assert engine.kv_bytes() == KVBytes(0, 0) and not engine.is_running("5")


def test_margins_are_the_lead_of_the_greedy_token(model_dir, shared):
    theirs, margins = shared(), []
    theirs.submit(requests()[1])
    while theirs.has_work():
        margins += [event.margin for event in theirs.step()]
    ours = create(config.Engine(budget=config.Budget(blocks=16)), model_dir("qwen3"))
    ours.submit(requests()[1])
    expected = []
    while ours.has_work():
        expected += [event.margin for event in ours.step()]
    ours.close()
    assert margins == pytest.approx(expected, abs=1e-4) and min(margins) > 0


def test_end_of_text_and_stop_tokens(shared, plain_greedy, monkeypatch):
    free = plain_greedy("qwen3", prompts()[1], 12)
    stop = free[4]
    expected = free[: free.index(stop) + 1]
    engine = shared()
    tokens, last = serve(engine, requests(stop_token_ids=(stop,))[1:2])
    assert tokens["1"] == expected and last["1"].finish_reason == "stop"
    monkeypatch.setattr(
        engine, "_loaded", dataclasses.replace(engine._loaded, eos_token_ids=frozenset({stop}))
    )
    tokens, last = serve(engine, requests(ignore_eos=False)[1:2])
    assert tokens["1"] == expected and last["1"].finish_reason == "stop"
    tokens, last = serve(engine, requests()[1:2])
    assert tokens["1"] == free and last["1"].finish_reason == "length"


def test_the_models_own_end_of_text_is_known(shared):
    assert shared()._loaded.eos_token_ids == {299}


def test_abort_leaves_the_others_as_they_were(shared, plain_greedy):
    engine = shared("llama", 5)
    asked = requests()
    for request in asked:
        engine.submit(request)
    tokens = {}

    def step(times=1):
        for _ in range(times):
            for event in engine.step():
                tokens.setdefault(event.request_id, []).append(event.token)

    step(4)
    assert "0" in tokens and engine._generator._prompt_batch.uids  # 2 is still in its prefill
    for gone in ("0", "2", "7", "unknown"):  # decoding, in its prefill, waiting
        engine.abort(gone)
    before = len(tokens["0"])
    assert in_flight(engine) == 1
    while engine.has_work():
        step()
        assert in_flight(engine) <= CAP
    assert len(tokens["0"]) == before and not {"2", "7"} & set(tokens)
    for i in (1, 3, 4, 5, 6):
        assert tokens[str(i)] == plain_greedy("llama", prompts()[i], 12)
    assert engine.counters()["requests.aborted"] == 3
    assert engine.counters()["requests.finished"] == 5


def test_what_cannot_be_served_ends_with_an_error_event(shared):
    engine = shared()
    bad = [
        Request("empty", ()),
        Request("high", (1, 300)),
        Request("low", (-1,)),
        Request("other", (1,), SamplingParams(min_p=0.1)),
    ]
    _, last = serve(engine, [*bad, requests()[0]])
    assert [last[r.request_id].finish_reason for r in bad] == ["error"] * 4
    assert "the prompt is empty" in last["empty"].error
    assert "token ids must be 0 to 299" in last["high"].error
    assert last["other"].error == "request other: min_p=0.1: engine=mlx_lm does not have it"
    assert last["0"].finish_reason == "length"
    assert engine.counters()["requests.refused"] == 4


def test_an_id_that_is_live_is_refused(shared):
    engine = shared()
    engine.submit(requests()[0])
    with pytest.raises(EngineError, match="request 0: this id is live already"):
        engine.submit(requests()[0])
    engine.step()
    with pytest.raises(EngineError, match="request 0: this id is live already"):
        engine.submit(requests()[0])
    engine.abort("0")
    assert not engine.has_work() and in_flight(engine) == 0


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(shared):
    engine = shared()
    asked = [
        Request(
            str(i),
            prompt,
            SamplingParams(
                temperature=0.5 + 0.2 * i,
                top_k=(0, 5, 1000)[i % 3],
                top_p=(1.0, 0.8)[i % 2],
                seed=None if i == 2 else 100 + i,
                max_tokens=10,
                ignore_eos=True,
            ),
        )
        for i, prompt in enumerate(prompts())
    ]
    together, last = serve(engine, asked)
    assert all(event.margin is None for event in last.values())
    shuffled, _ = serve(engine, asked[::-1])
    assert together == shuffled
    other = dataclasses.replace(asked[3], params=dataclasses.replace(asked[3].params, seed=1))
    tokens, _ = serve(engine, [other])
    assert tokens["3"] != together["3"]


def test_greedy_requests_share_one_sampler_so_that_mlx_lm_samples_them_in_one_call():
    first, second, drawn = (
        sampler_of(Request(name, (1,), SamplingParams(temperature=t)))
        for name, t in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first is second is not drawn


def test_every_token_is_a_new_draw():
    import mlx.core as mx

    draw = sampler_of(Request("a", (1,), SamplingParams(temperature=1, seed=3)))
    assert len({draw(mx.zeros((1, 300))).item() for _ in range(10)}) > 5


def test_weights_in_half_precision_become_float32(model_dir, tmp_path):
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = mx.load(str(model_dir("qwen3") / "model.safetensors"))
    half = {name: value.astype(mx.float16) for name, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), half, metadata={"format": "mlx"})
    shutil.copy(model_dir("qwen3") / "config.json", tmp_path)
    model = load(tmp_path).model
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32}


def test_broken_logits_are_an_error(shared, monkeypatch):
    engine = shared()
    monkeypatch.setattr("labkit.engine.mlx_lm.engine.lead", lambda *_: float("nan"))
    engine.submit(requests()[0])
    with pytest.raises(InvalidLogitsError, match="request 0"):
        while engine.has_work():
            engine.step()
    monkeypatch.undo()
    engine.abort("0")


def test_a_closed_engine_holds_nothing(model_dir):
    engine = create(options(), model_dir("qwen3"))
    engine.submit(requests()[0])
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_work()
    with pytest.raises(EngineError, match="closed"):
        engine.step()


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match="engine=mlx_lm: ") as caught:
        create(options(), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"attention": config.Attention(resolver="seq_map")},
            "engine.attention.resolver=seq_map: engine=mlx_lm does not have it; "
            "leave it binary_search",
        ),
        (
            {"budget": config.Budget(blocks=64)},
            "engine.budget.blocks=64: engine=mlx_lm does not have it; leave it null",
        ),
        ({"kv": config.KV(block_size=8)}, "engine.kv.block_size=8"),
        (
            {"scheduler": config.Scheduler(max_num_batched_tokens=64)},
            "engine.scheduler.max_num_batched_tokens=64",
        ),
        (
            {
                "attention": config.Attention(backend="reference"),
            },
            "engine.attention.backend=reference: engine=mlx_lm does not have it; leave it fused",
        ),
    ],
)
def test_options_of_other_engines_are_refused(changes, said):
    with pytest.raises(config.ConfigError) as caught:
        config.Engine(name="mlx_lm", **changes)
    assert str(caught.value).startswith(said)


def test_its_own_options_are_taken():
    scheduler = config.Scheduler(max_num_seqs=4, chunk=64)
    engine = config.Engine(
        name="mlx_lm",
        threads=1,
        blas=config.Blas.stock,
        memory_limit=1 << 30,
        mlx_cache_limit=1 << 20,
        scheduler=scheduler,
    )
    assert engine.scheduler.chunk == 64


def test_a_kernel_workload_is_refused():
    with pytest.raises(config.ConfigError, match=r"engine\.name=mlx_lm: it serves requests"):
        config.Experiment(
            engine=options(),
            model=config.Model(shape=config.ModelShape()),
            workload=config.Workload(
                name="k",
                kind=config.WorkloadKind.kernel,
                cases=[config.Case("d", decode=1, context=1)],
            ),
            ablation=config.Ablation(arms={"base": {}}),
        )
