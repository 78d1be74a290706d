"""Every KV layout and attention backend gives plain mlx_lm's tokens, and leaks nothing."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import NO_TOKEN

LENGTHS = (3, 8, 17, 40, 1, 33, 16, 15)
PRESETS = {
    "naive": {
        "kv": config.KV(layout=config.KVLayout.padded),
        "attention": config.Attention(backend="sdpa"),
    },
    "padded": {
        "kv": config.KV(layout=config.KVLayout.padded),
        "attention": config.Attention(backend="sdpa"),
    },
    "contiguous": {
        "kv": config.KV(layout=config.KVLayout.contiguous),
        "attention": config.Attention(backend="sdpa"),
    },
    "gather": {"attention": config.Attention(backend="gather")},
}
STATIC = {
    "admission": config.Admission.static,
    "order": config.Order.prefill_first,
    "composition": config.Composition.split,
}
SPLIT = {"order": config.Order.prefill_first, "composition": config.Composition.split}
SCHEDULER = {"naive": STATIC, "padded": SPLIT, "contiguous": {}, "gather": {}}


def options(preset, tokens=16, **budget):
    return config.Engine(
        name="paged" if preset == "gather" else preset,
        scheduler=config.Scheduler(
            max_num_seqs=4, max_num_batched_tokens=tokens, **SCHEDULER[preset]
        ),
        budget=config.Budget(**budget or {"blocks": 256}),
        **PRESETS[preset],
    )


def prompts():
    rng = np.random.default_rng(1)
    return [tuple(int(t) for t in rng.integers(0, 298, n)) for n in LENGTHS]


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


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "quantised"])
def test_greedy_tokens_equal_plain_mlx_lm(name, preset, model_dir, plain_greedy):
    """NumPy forward, sliding windows, and the MLX forward (quantised)."""
    engine = create(options(preset), model_dir(name))
    lengths = (1, 12, 5, 9, 3, 14, 8, 2)
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=n, ignore_eos=True))
        for i, (p, n) in enumerate(zip(prompts(), lengths, strict=True))
    ]
    tokens, last = serve(engine, requests)
    for i, (prompt, n) in enumerate(zip(prompts(), lengths, strict=True)):
        assert tokens[str(i)] == plain_greedy(name, prompt, n), f"{name}, prompt {i}"
        assert last[str(i)].finish_reason == "length"
    counters = engine.counters()
    layout = "padded" if preset == "naive" else "paged" if preset == "gather" else preset
    assert counters[f"layout.{layout}"] == counters["steps.total"]
    assert counters["steps.total"] == counters[f"engine.{engine.name}"] > 0
    assert counters["kernel.gather" if preset == "gather" else "kernel.sdpa"] > 0
    assert (counters["tokens.padded"] > 0) == (layout == "padded")
    assert 0 < counters["kv_used_bytes"] <= counters["peak_kv_bytes"]
    assert engine.kv_bytes().reserved == 0
    assert engine.notes["self_test_difference"] < 1e-5


def test_memory_grows_in_steps_and_every_copy_is_counted(model_dir, plain_greedy):
    """A context that crosses 256 tokens while others run."""
    rng = np.random.default_rng(5)
    prompts_by_length = {n: tuple(int(t) for t in rng.integers(0, 298, n)) for n in (250, 3)}
    for preset in ("padded", "contiguous"):
        engine = create(options(preset, tokens=300), model_dir("qwen3"))
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        tokens, _ = serve(
            engine, [Request(str(n), p, params) for n, p in prompts_by_length.items()]
        )
        for n, prompt in prompts_by_length.items():
            assert tokens[str(n)] == plain_greedy("qwen3", prompt, 10)
        counters, token = engine.counters(), engine._cache.token_bytes
        rows, copied = (2, 256 + 9) if preset == "padded" else (1, 256)
        assert counters["kv.moves"] == 1
        assert counters["kv.bytes_copied"] == copied * token
        small = 256 * token  # what the other request holds, or the second row
        layer = 256 * rows * token // 3  # a layer's old memory beside its new
        assert counters["peak_kv_bytes"] == 512 * rows * token + layer + small * (2 - rows)
        # The long one's memory is given back before the short one's last token counts.
        assert counters["kv_used_bytes"] == (259 + 11) * token


def test_a_static_batch_computes_the_rows_of_finished_requests(model_dir, plain_greedy):
    outputs = (2, 5, 3, 9)
    engine = create(options("naive"), model_dir("llama"))
    same = [(7 + i, 3, 5, 8) for i in range(5)]
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=n, ignore_eos=True))
        for i, (p, n) in enumerate(zip(same, (*outputs, 2), strict=True))
    ]
    first, stayed = {}, []
    for request in requests:
        engine.submit(request)
    steps = 0
    while engine.has_work():
        steps += 1
        for event in engine.step():
            first.setdefault(event.request_id, steps)
        stayed += engine.lingering_requests()
    # One prefill and eight decodes of four rows, then a batch of its own for the fifth.
    assert [first[str(i)] for i in range(5)] == [1, 1, 1, 1, 10] and steps == 11
    counters = engine.counters()
    assert counters["tokens.padded"] == sum(max(outputs) - n for n in outputs)
    assert {i: stayed.count(str(i)) for i in range(5)} == {0: 7, 1: 4, 2: 6, 3: 0, 4: 0}
    assert counters["tokens.decode"] == sum(n - 1 for n in outputs) + 1
    assert counters["admission.static"] == 5


def test_padding_rows_are_inert(model_dir, monkeypatch):
    """Other tokens in the padding leave every bit of the results as it was."""
    from labkit.engine.kv_layout import padded

    def margins():
        engine = create(options("naive"), model_dir("gemma3"))
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        events = []
        for i, prompt in enumerate(prompts()):
            engine.submit(Request(str(i), prompt, params))
        while engine.has_work():
            events += [(event.request_id, event.token, event.margin) for event in engine.step()]
        assert engine.counters()["tokens.padded"] > 0
        return events

    plain, real = margins(), padded.pad_batch

    def other(batch, scheduled, finished, dense):
        computed, step = real(batch, scheduled, finished, dense)
        padding = np.setdiff1d(np.arange(computed.total_q), step.target)
        computed.tokens[padding] = 17
        return computed, step

    monkeypatch.setattr(padded, "pad_batch", other)
    assert margins() == plain


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_leaks_and_no_request_disturbs_another(preset, model_dir, plain_greedy):
    """Random arrivals, lengths and aborts in memory too small for all."""
    rng = np.random.default_rng(3)
    tight = {"blocks": 50} if preset != "gather" else {"blocks": 12}
    engine = create(options(preset, **tight), model_dir("qwen3"))
    requested, tokens, dead = {}, {}, set()
    while len(requested) < 25 or engine.has_work():
        if len(requested) < 25 and rng.random() < 0.6:
            name, which = f"r{len(requested)}", int(rng.integers(len(LENGTHS)))
            requested[name] = (prompts()[which], int(rng.integers(1, 13)))
            params = SamplingParams(max_tokens=requested[name][1], ignore_eos=True)
            engine.submit(Request(name, requested[name][0], params))
        if requested and rng.random() < 0.1:
            name = f"r{rng.integers(max(0, len(requested) - 6), len(requested))}"
            engine.abort(name)
            dead.add(name)
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
            assert event.request_id not in dead
            if event.finish_reason is not None:
                dead.add(event.request_id)
        engine.check()
        computed = engine._scheduler.num_computed_tokens * engine._cache.token_bytes
        kv = engine.kv_bytes()
        assert computed <= kv.reserved <= kv.total
    for name, output in tokens.items():
        prompt, most = requested[name]
        assert output == plain_greedy("qwen3", prompt, 12)[:most][: len(output)]
    counters = engine.counters()
    assert engine.kv_bytes().reserved == 0 and counters["requests.aborted"] > 0
    capacity = tight["blocks"] * 16 * engine._cache.token_bytes
    # While memory moves, one layer of three is there twice.
    assert counters["peak_kv_bytes"] <= capacity * 4 / 3
    counted = counters["requests.finished"] + counters["requests.aborted"]
    assert counted == counters["requests.submitted"] == 25


@pytest.mark.parametrize("preset", ["naive", "padded", "contiguous"])
def test_a_request_that_can_never_fit_is_refused_and_the_others_go_on(preset, model_dir):
    engine = create(options(preset, blocks=16), model_dir("qwen3"))  # 256 tokens
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    requests = [Request("a", (1, 2), params), Request("b", (1,), long), Request("c", (3,), params)]
    tokens, last = serve(engine, requests)
    assert {k: v.finish_reason for k, v in last.items()} == {
        "a": "length",
        "b": "error",
        "c": "length",
    }
    assert "of 512 tokens, but there is room for only 256; raise the budget" in last["b"].error
    assert len(tokens["a"]) == len(tokens["c"]) == 3
