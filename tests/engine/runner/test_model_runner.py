"""One forward for a whole batch or for each request, replayed or layer by layer: equal tokens."""

import numpy as np
import pytest
from architectures import settings
from small_models import build_model_dir

from labkit import config
from labkit.config import ConfigError
from labkit.engine import EngineError, Request, SamplingParams, create
from labkit.engine.engine_protocol import NO_TOKEN

LENGTHS = (3, 1, 17, 40, 9)
ENGINES = {
    "fused": {"name": "paged"},
    "gather": {"name": "paged", "attention": config.Attention(backend="gather")},
    "contiguous": {
        "name": "contiguous",
        "kv": config.KV(layout=config.KVLayout.contiguous),
        "attention": config.Attention(backend="sdpa"),
    },
}
PER_REQUEST = config.Forward.per_request


def engine(model, kind="fused", **options):
    scheduler = config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16)
    budget = config.Budget(blocks=256)
    return create(
        config.Engine(scheduler=scheduler, budget=budget, **{**ENGINES[kind], **options}), model
    )


def prompts():
    rng = np.random.default_rng(1)
    return [tuple(int(t) for t in rng.integers(0, 298, n)) for n in LENGTHS]


def serve(engine, **params):
    tokens, scores = {}, {}
    for index, prompt in enumerate(prompts()):
        params = {"max_tokens": 6, "ignore_eos": True} | params
        engine.submit(Request(str(index), prompt, SamplingParams(**params)))
    while engine.has_work():
        for event in engine.step():
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.prompt_logprobs is not None:
                scores[event.request_id] = event.prompt_logprobs
    return tokens, scores


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "quantised"])
def test_a_forward_per_request_gives_plain_mlx_lm_s_tokens(name, kind, model_dir, plain_greedy):
    one = engine(model_dir(name), kind, forward=PER_REQUEST)
    tokens, _ = serve(one)
    assert tokens == {str(i): plain_greedy(name, p, 6) for i, p in enumerate(prompts())}
    counters = one.counters()
    assert counters["forwards.per_request"] > counters["steps.total"]
    assert "forwards.batched" not in counters
    layout = "contiguous" if kind == "contiguous" else "paged"
    assert counters[f"layout.{layout}"] == counters["steps.total"]


def test_the_resolver_s_maps_are_timed_in_every_forward_per_request(model_dir, monkeypatch):
    one = engine(model_dir("qwen3"), forward=PER_REQUEST)
    runner = one._loop._launcher.run_model
    prepare = runner.memory.prepare_step

    def prepare_step(batch):
        batch, attention = prepare(batch)
        return batch, attention._replace(counters={**attention.counters, "attention.map_us": 2.0})

    monkeypatch.setattr(runner, "memory", runner.memory._replace(prepare_step=prepare_step))
    serve(one)
    counters = one.counters()
    assert counters["forwards.per_request"] > counters["steps.total"] == counters["layout.paged"]
    assert counters["attention.map_us"] == 2 * counters["forwards.per_request"]


def test_a_forward_per_request_scores_prompts_as_one_forward_does(model_dir):
    """The rows of a step's logits have the batch's order, not that of the requests."""
    results = [
        serve(engine(model_dir("qwen3"), forward=forward), prompt_logprobs=2)[1]
        for forward in config.Forward
    ]
    assert set(results[0]) == {"0", "2", "3", "4"}  # the second prompt has one token
    assert repr(results[0]) == repr(results[1])


def test_replay_can_be_turned_off(model_dir):
    replayed, eager = (engine(model_dir("qwen3"), graph_replay=on) for on in (True, False))
    assert serve(replayed) == serve(eager)
    assert replayed.counters()["forward.replayed"] > 0
    assert replayed.notes["not_replayed"] is None
    counters = eager.counters()
    assert counters["forward.eager"] == counters["steps.total"] == counters["forward.numpy"]
    assert "forward.replayed" not in counters
    assert eager.notes["not_replayed"] == "engine.graph_replay=false"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculation": config.Speculation.ngram}, "drafts are verified in one forward"),
        ({"decode_shape": config.DecodeShape.fixed}, "a single request is not padded"),
        ({"parallel": config.TensorParallel(size=2)}, "ranks run one forward for all"),
    ],
)
def test_what_needs_a_batch_is_refused(options, says):
    with pytest.raises(ConfigError, match=rf"^engine\.forward=per_request: .*{says}"):
        config.Engine(forward=PER_REQUEST, **options)


def test_a_padded_cache_is_refused():
    padded = {"kv": config.KV(layout=config.KVLayout.padded), "name": "padded"}
    scheduler = config.Scheduler(composition=config.Composition.split)
    sdpa = config.Attention(backend="sdpa")
    with pytest.raises(ConfigError, match=r"kv\.layout=padded has all requests in one array"):
        config.Engine(forward=PER_REQUEST, scheduler=scheduler, attention=sdpa, **padded)


def test_recurrent_states_are_refused(tmp_path):
    model = build_model_dir(tmp_path / "lfm2", settings("lfm2"))
    with pytest.raises(EngineError, match=r"^engine\.forward=per_request: model_type=lfm2 has rec"):
        engine(model, "gather", forward=PER_REQUEST)
