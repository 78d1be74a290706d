"""``engine=mlx_lm``: tokens equal plain mlx_lm's, its sampling, its limits, and its errors."""

import dataclasses
import shutil

import pytest
from mlx_lm_bench import CAP, in_flight, options, prompts, requests, serve

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import EngineError, InvalidLogitsError
from labkit.engine.mlx_lm.batch_generator import make_request_sampler
from labkit.engine.model.unpatched_loader import load


@pytest.mark.parametrize(("name", "chunk"), [("qwen3", None), ("llama", 5), ("gemma3", None)])
def test_greedy_tokens_equal_plain_mlx_lm(name, chunk, shared, plain_greedy):
    engine = shared(name, chunk)
    tokens, last = serve(engine, requests())
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy(name, prompt, 12), f"prompt {i}"
        assert last[str(i)].finish_reason == "length" and last[str(i)].margin > 0


def test_end_of_text_and_stop_tokens(shared, plain_greedy, monkeypatch):
    free = plain_greedy("qwen3", prompts()[1], 12)
    stop = free[4]
    expected = free[: free.index(stop) + 1]
    engine = shared()
    tokens, last = serve(engine, requests(stop_token_ids=(stop,))[1:2])
    assert tokens["1"] == expected and last["1"].finish_reason == "stop"
    monkeypatch.setattr(
        engine, "_model", dataclasses.replace(engine._model, eos_token_ids=frozenset({stop}))
    )
    tokens, last = serve(engine, requests(ignore_eos=False)[1:2])
    assert tokens["1"] == expected and last["1"].finish_reason == "stop"
    tokens, last = serve(engine, requests()[1:2])
    assert tokens["1"] == free and last["1"].finish_reason == "length"


def test_the_models_own_end_token_is_known(shared):
    assert shared()._model.eos_token_ids == {299}


def test_abort_does_not_change_other_requests(shared, plain_greedy):
    engine = shared("llama", 5)
    submitted = requests()
    for request in submitted:
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


def test_an_impossible_request_ends_with_an_error_event(shared):
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
    assert (
        last["other"].error
        == "request other: min_p=0.1: not supported by engine=mlx_lm; leave it at its default"
    )
    assert last["0"].finish_reason == "length"
    assert engine.counters()["requests.refused"] == 4


def test_a_request_id_in_use_is_refused(shared):
    engine = shared()
    engine.submit(requests()[0])
    with pytest.raises(EngineError, match="request 0: this id is already in use"):
        engine.submit(requests()[0])
    engine.step()
    with pytest.raises(EngineError, match="request 0: this id is already in use"):
        engine.submit(requests()[0])
    engine.abort("0")
    assert not engine.has_work() and in_flight(engine) == 0


def test_weights_in_half_precision_become_float32(model_dir, tmp_path):
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = mx.load(str(model_dir("qwen3") / "model.safetensors"))
    half = {name: value.astype(mx.float16) for name, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), half, metadata={"format": "mlx"})
    shutil.copy(model_dir("qwen3") / "config.json", tmp_path)
    model = load(tmp_path).model
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32}


def test_nan_logits_are_an_error(shared, monkeypatch):
    engine = shared()
    model = type(engine._model.model)
    call = model.__call__
    monkeypatch.setattr(
        model, "__call__", lambda *args, **options: call(*args, **options) * float("nan")
    )
    engine.submit(requests()[0])
    with pytest.raises(InvalidLogitsError, match="request 0"):
        while engine.has_work():
            engine.step()
    monkeypatch.undo()
    engine.abort("0")


def test_a_closed_engine_holds_no_memory(model_dir):
    engine = create(options(), model_dir("qwen3"))
    engine.submit(requests()[0])
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_work()
    with pytest.raises(EngineError, match="closed"):
        engine.step()


@pytest.mark.parametrize(
    ("weights", "message"),
    [(None, "has no model"), (b"", "is empty"), (b"version https://git-lfs", "run: git lfs pull")],
)
def test_a_directory_that_is_no_model_is_refused(tmp_path, weights, message):
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(EngineError, match=f"engine=mlx_lm: .*{message}") as caught:
        create(options(), tmp_path)
    assert "\n" not in str(caught.value)


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(shared):
    engine = shared()
    submitted = [
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
    together, last = serve(engine, submitted)
    assert all(event.margin is None for event in last.values())
    shuffled, _ = serve(engine, submitted[::-1])
    assert together == shuffled
    other = dataclasses.replace(
        submitted[3], params=dataclasses.replace(submitted[3].params, seed=1)
    )
    tokens, _ = serve(engine, [other])
    assert tokens["3"] != together["3"]


def test_greedy_requests_share_one_sampler_so_that_mlx_lm_samples_them_in_one_call():
    first, second, drawn = (
        make_request_sampler(Request(name, (1,), SamplingParams(temperature=t)))
        for name, t in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first is second is not drawn


def test_every_token_is_drawn_anew():
    import mlx.core as mx

    draw = make_request_sampler(Request("a", (1,), SamplingParams(temperature=1, seed=3)))
    assert len({draw(mx.zeros((1, 300))).item() for _ in range(10)}) > 5


def test_the_margin_is_the_greedy_tokens_lead(model_dir, shared):
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
