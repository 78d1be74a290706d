"""The paged engine's tokens equal plain mlx_lm's for every prompt."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import NO_TOKEN, EngineError
from labkit.engine.runner.packed_forward import LogitRowSelector

LENGTHS = (3, 8, 17, 40, 1, 33, 16, 15)
ARCHITECTURES = ("qwen3", "llama", "gemma3")


def prompts(lengths=LENGTHS, seed=1):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, 298, n)) for n in lengths]


def options(**attention):
    return config.Engine(
        scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16),
        kv=config.KV(block_size=8),
        budget=config.Budget(blocks=64),
        attention=config.Attention(**attention),
    )


def serve(engine, requests):
    tokens, last = {}, {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for event in engine.step():
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                last[event.request_id] = event
        engine.check()
    return tokens, last


def create_mlx(chosen, path):
    """An engine whose model was refused by the NumPy path."""
    from labkit.engine.numpy_port.model_conversion import Conversion

    with pytest.MonkeyPatch.context() as patch:
        refuse = Conversion("refused for the test")
        patch.setattr(
            "labkit.engine.numpy_port.model_conversion.convert", lambda model, **_: refuse
        )
        return create(chosen, path)


@pytest.fixture(scope="module")
def engine_for(model_dir):
    engines = {}

    def find(name, make=create):
        key = (name, make)
        if key not in engines:
            engines[key] = make(options(), model_dir(name))
        engines[key].reset_counters()
        return engines[key]

    yield find
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("forward", ["numpy", "mlx"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_plain_mlx_lm(name, forward, engine_for, plain_greedy):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = engine_for(name, create if forward == "numpy" else create_mlx)
    tokens, last = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy(name, prompt, 20), f"{name}, prompt {i}"
        assert last[str(i)].finish_reason == "length"
    counters = engine.counters()
    assert counters["steps.mixed"] > 0
    assert counters["tokens.prefill"] == sum(LENGTHS)
    assert counters["tokens.decode"] == 19 * len(LENGTHS)
    assert counters["tokens.padded"] == 0
    assert counters["blocks.allocated"] == counters["blocks.freed"] > 0
    assert counters["peak_kv_bytes"] == counters["blocks.peak"] * counters["kv_block_bytes"] > 0
    assert counters["resolver.binary_search"] > 0
    assert counters[f"forward.{forward}"] == counters["steps.total"] == counters["engine.paged"]
    assert engine.notes["forward"] == forward
    assert (engine.notes["forward_reason"] is None) == (forward == "numpy")
    assert engine.notes["self_test_difference"] < 1e-5


def test_a_quantised_model_runs_as_stored(engine_for, plain_greedy):
    engine = engine_for("quantised")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy("quantised", prompt, 12)
    assert engine.notes["forward"] == "numpy"
    assert engine.notes["forward_reason"] is None


def test_a_model_runs_on_mlx_where_its_attention_runs_on_metal(model_dir):
    from labkit.engine.model.model_loader import load_model
    from labkit.engine.runner.packed_forward import choose_forward

    chosen = [choose_forward(load_model(model_dir("llama")), device) for device in config.Device]
    assert [forward.name for forward in chosen] == [
        "numpy" if device is config.Device.cpu else "mlx" for device in config.Device
    ]
    assert any("device=metal" in (forward.conversion.reason or "") for forward in chosen)


@pytest.mark.parametrize("make", [create, create_mlx])
def test_steps_that_sample_nothing(make, engine_for, plain_greedy):
    """A prompt longer than the budget, alone: no row needs logits until the last chunk."""
    engine = engine_for("llama", make)
    prompt = prompts()[3]
    engine.submit(Request("a", prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
    assert engine.step() == engine.step() == []
    tokens, _ = serve(engine, [])
    assert tokens["a"] == plain_greedy("llama", prompt, 3)


def test_the_answers_of_the_fixture_models_are_not_degenerate(plain_greedy):
    for name in ARCHITECTURES:
        answers = [tuple(plain_greedy(name, p, 20)) for p in prompts()]
        assert len(set(answers)) == len(answers)
        assert np.mean([len(set(answer)) for answer in answers]) > 5


def test_the_window_matters_in_the_fixture(model_dir, plain_greedy, tmp_path):
    """Else a forgotten sliding window would pass."""
    import json

    wide = tmp_path / "wide"
    wide.mkdir()
    settings = json.loads((model_dir("gemma3") / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(settings | {"sliding_window": 500}))
    (wide / "model.safetensors").symlink_to(model_dir("gemma3") / "model.safetensors")
    engine = create(options(), wide)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    tokens, _ = serve(engine, [Request("a", prompts()[3], params)])
    assert tokens["a"] != plain_greedy("gemma3", prompts()[3], 20)


@pytest.mark.parametrize("backend", [{"resolver": "seq_map"}, {"backend": "reference"}])
def test_every_backend_and_resolver_gives_the_same_tokens(backend, model_dir, plain_greedy):
    engine = create(options(**backend), model_dir("qwen3"))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts()[:4])])
    for i, prompt in enumerate(prompts()[:4]):
        assert tokens[str(i)] == plain_greedy("qwen3", prompt, 6)
    assert engine.counters()["steps.mixed"] > 0


def test_margins_are_the_lead_of_the_greedy_token(engine_for):
    engine = engine_for("llama")
    engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
    margins = []
    while engine.has_work():
        margins += [event.margin for event in engine.step()]
    assert len(margins) == 4 and all(margin > 0 for margin in margins)


def test_end_of_text_and_stop_tokens(engine_for, plain_greedy):
    prompt = prompts()[1]
    free = plain_greedy("qwen3", prompt, 20)
    stop = free[6]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    tokens, last = serve(engine_for("qwen3"), [Request("a", prompt, params)])
    assert tokens["a"] == free[: free.index(stop) + 1]
    assert last["a"].finish_reason == "stop"


def test_sampled_tokens_do_not_depend_on_the_batch(engine_for):
    engine = engine_for("qwen3")
    requests = [
        Request(
            str(i),
            prompt,
            SamplingParams(
                temperature=0.5 + 0.2 * i,
                top_k=(0, 5, 40)[i % 3],
                top_p=(1.0, 0.8)[i % 2],
                seed=None if i == 2 else 100 + i,
                max_tokens=10,
                ignore_eos=True,
            ),
        )
        for i, prompt in enumerate(prompts())
    ]
    together, _ = serve(engine, requests)
    shuffled, _ = serve(engine, requests[::-1])
    assert together == shuffled
    for request in requests:
        alone, _ = serve(engine, [request])
        assert alone[request.request_id] == together[request.request_id]
    assert all(event.margin is None for event in serve(engine, requests[:1])[1].values())


def test_abort_in_the_middle_leaves_the_others_as_they_were(engine_for, plain_greedy):
    engine = engine_for("qwen3")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for i, prompt in enumerate(prompts()[:4]):
        engine.submit(Request(str(i), prompt, params))
    for _ in range(3):
        engine.step()
    engine.abort("3")  # in its prefill
    engine.abort("0")  # decoding
    tokens = {}
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
        engine.check()
    assert set(tokens) == {"1", "2"}
    for i in (1, 2):
        assert tokens[str(i)] == plain_greedy("qwen3", prompts()[i], 12)[-len(tokens[str(i)]) :]
    counters = engine.counters()
    assert counters["blocks.allocated"] == counters["blocks.freed"]


def test_reused_blocks_do_not_leak_old_keys(model_dir, plain_greedy):
    """Freed blocks hold NaN: a key read before it is written would show."""
    tight = options()
    tight.budget.blocks = 9
    engine = create(tight, model_dir("qwen3"))
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    backend = engine._loop._launcher.run_model.memory.attention
    for pool in [*backend.keys, *backend.values]:
        pool[:] = np.nan
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy("qwen3", prompt, 10)


def test_two_engines_in_one_process_do_not_disturb_each_other(model_dir, plain_greedy):
    first, second = create(options(), model_dir("qwen3")), create(options(), model_dir("gemma3"))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for i, prompt in enumerate(prompts()[:3]):
        first.submit(Request(str(i), prompt, params))
        second.submit(Request(str(i), prompt, params))
    tokens = {"qwen3": {}, "gemma3": {}}
    while first.has_work() or second.has_work():
        for name, engine in (("qwen3", first), ("gemma3", second)):
            for event in engine.step():
                tokens[name].setdefault(event.request_id, []).append(event.token)
    for name, answers in tokens.items():
        for i, prompt in enumerate(prompts()[:3]):
            assert answers[str(i)] == plain_greedy(name, prompt, 8)


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_an_architecture_whose_logits_differ_is_refused(factor, model_dir, monkeypatch):
    from labkit.engine.attention.backends.reference import ReferenceBackend

    real = ReferenceBackend.attend

    def wrong(self, *args):
        out, report = real(self, *args)
        out *= factor
        return out, report

    monkeypatch.setattr(ReferenceBackend, "attend", wrong)
    with pytest.raises(EngineError, match="logits differ from plain mlx_lm's"):
        create(options(backend="reference"), model_dir("qwen3"))


def test_a_forward_that_returns_wrong_rows_is_refused(model_dir, monkeypatch):
    """If all rows are requested, the first ones are the right ones."""
    monkeypatch.setattr(
        LogitRowSelector, "__call__", lambda self, h: self.norm(h[: len(self.rows)])
    )
    with pytest.raises(EngineError, match="logits differ from plain mlx_lm's"):
        create(options(), model_dir("qwen3"))


def test_a_stale_stamp_stops_the_step(model_dir, monkeypatch):
    import dataclasses

    from labkit.engine.attention.backends.reference import ReferenceBackend
    from labkit.engine.engine_protocol import StaleLaunchError

    engine = create(options(backend="reference"), model_dir("qwen3"))
    real = ReferenceBackend.attend

    def stale(self, *args):
        out, report = real(self, *args)
        return out, dataclasses.replace(report, stamp=report.expected_stamp ^ 1)

    monkeypatch.setattr(ReferenceBackend, "attend", stale)
    engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=2)))
    with pytest.raises(StaleLaunchError, match="layer 0"):
        engine.step()


def test_a_budget_below_two_blocks_is_refused(model_dir):
    small = options()
    small.budget = config.Budget(bytes=1 << 16)
    create(small, model_dir("qwen3")).close()  # 24,576 bytes a block: two fit
    small.kv.block_size = 32
    with pytest.raises(
        EngineError, match=r"engine\.budget\.bytes=65536: a pool needs at least two KV blocks"
    ):
        create(small, model_dir("qwen3"))


def test_the_identity_resolver_cannot_serve_requests(model_dir):
    with pytest.raises(EngineError, match=r"engine\.attention\.resolver=identity"):
        create(options(resolver="identity"), model_dir("qwen3"))
