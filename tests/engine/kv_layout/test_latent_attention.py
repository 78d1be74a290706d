"""Latent attention: plain mlx_lm's tokens with every scheduler, layout, cache and speculation."""

import numpy as np
import pytest
from architectures import LATENT, settings
from small_models import build_model_dir

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.memory_budget import model_footprint
from labkit.models.synthetic.synthetic_model import build

TOKENS = 10
SHARED = (7, 3, 9, 2) * 5
SPLIT = {"order": config.Order.prefill_first, "composition": config.Composition.split}
DENSE = {"budget": config.Budget(blocks=400), "attention": config.Attention(backend="sdpa")}
# Five blocks of 8 tokens per request at least, and 12 in the pool: one request is preempted.
OPTIMISTIC = {"reservation": config.Reservation.optimistic, "watermark": 0}
ARMS = {
    "fused": {},
    "gather": {"attention": config.Attention(backend="gather")},
    "reference": {"attention": config.Attention(backend="reference")},
    "contiguous": {"name": "contiguous", "kv": {"layout": config.KVLayout.contiguous}, **DENSE},
    "padded": {
        "name": "padded",
        "kv": {"layout": config.KVLayout.padded},
        "scheduler": SPLIT,
        **DENSE,
    },
    "prefill_first": {"scheduler": SPLIT},
    "preempted": {"scheduler": OPTIMISTIC, "budget": config.Budget(blocks=13)},
    "hash": {"prefix_cache": config.PrefixCache.hash},
    "radix": {"prefix_cache": config.PrefixCache.radix},
    "ngram": {"speculation": config.Speculation.ngram},
    "mlx_lm": {"name": "mlx_lm"},
}


def options(name="paged", kv=None, scheduler=None, **engine):
    limits = {} if name == "mlx_lm" else {"max_num_batched_tokens": 12}
    if name != "mlx_lm":
        engine.setdefault("budget", config.Budget(blocks=40))
        kv = {"block_size": 8, **(kv or {})}
    return config.Engine(
        name=name,
        scheduler=config.Scheduler(max_num_seqs=3, **limits, **(scheduler or {})),
        kv=config.KV(**(kv or {})),
        **engine,
    )


def prompts():
    rng = np.random.default_rng(1)
    tails = [tuple(int(t) for t in rng.integers(0, 126, n)) for n in (5, 12, 1)]
    return [SHARED + tail for tail in tails]


def serve(engine):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    tokens = {str(i): [] for i in range(3)}
    for index, prompt in enumerate(prompts()):
        engine.submit(Request(str(index), prompt, params))
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            if event.token >= 0:
                tokens[event.request_id].append(event.token)
    return list(tokens.values())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build_model_dir(tmp_path_factory.mktemp("latent") / "model", settings("deepseek_v3"))


@pytest.fixture(scope="module")
def expected(model_dir):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model = load_model(model_dir)[0]
    steps = [generate_step(mx.array(p), model, max_tokens=TOKENS) for p in prompts()]
    return [[int(token) for token, _ in one] for one in steps]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_gives_plain_mlx_lm_s_tokens(arm, model_dir, expected):
    engine = create(options(**ARMS[arm]), model_dir)
    first, second = serve(engine), serve(engine)
    assert first == second == expected
    counters = engine.counters()
    if arm == "preempted":
        assert counters["preemptions"] > 0
    if arm in ("hash", "radix"):
        assert counters["prefix.hit_tokens"] > 0
    if arm == "ngram":
        assert counters["spec.accepted"] > 0
    engine.close()


def test_a_token_has_one_key_that_holds_its_value(model_dir):
    engine = create(options(), model_dir)
    serve(engine)
    width = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert engine.counters()["kv_block_bytes"] == 2 * 8 * width * 4
    footprint = model_footprint.from_directory(model_dir)
    assert footprint.kv_bytes_per_token * 8 == engine.counters()["kv_block_bytes"]
    engine.close()


def test_a_latent_is_not_wider_than_its_key():
    assert KVShape(1, 32, 24, latent=True).token_bytes() == 32 * 4
    assert KVShape(2, 24, 16).token_bytes("float16") == 2 * 40 * 2
    with pytest.raises(ValueError, match="value_dim=24 is more than key_dim=16"):
        KVShape(1, 16, 24, latent=True)


def test_a_synthetic_latent_model_runs_on_numpy_and_is_counted_before_it_is_loaded():
    shape = config.ModelShape(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, kv_lora_rank=48,
        intermediate_size=64, vocab_size=512,
    )  # fmt: skip
    path = build(shape, seed=0, name="latent")
    engine = create(options(), path)
    assert engine.notes["forward"] == "numpy"
    gather = create(options(attention=config.Attention(backend="gather")), path)
    assert serve(engine) == serve(gather)
    block_bytes = engine.counters()["kv_block_bytes"]
    planned = model_footprint.from_shape(shape, "latent")
    written = model_footprint.from_directory(path)
    assert planned.kv_bytes_per_token == written.kv_bytes_per_token == block_bytes / 8
    assert (planned.weights, planned.weight_bytes) == (written.weights, written.weight_bytes)


def test_latent_attention_has_one_head_of_keys():
    with pytest.raises(config.ConfigError, match=r"num_kv_heads=4: latent attention .* has 1"):
        config.ModelShape(kv_lora_rank=48)
