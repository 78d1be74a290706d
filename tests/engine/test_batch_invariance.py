"""``engine.batch_invariant=true``: a request's logits are the same bits, whatever the batch."""

import numpy as np
import pytest

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.numpy_port.model_conversion import Conversion
from labkit.engine.sampling import sampler

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
rng = np.random.default_rng(3)
PROMPTS = {f"r{i}": tuple(rng.integers(0, 298, n).tolist()) for i, n in enumerate((40, 7, 1, 18))}
SCHEDULES = {
    "one batch": {},
    "small steps": {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    "small chunks": {"chunk": 3},
    "shrinking chunks": {"chunk": 9, "chunk_policy": config.ChunkPolicy.shrinking},
    "split": {"composition": config.Composition.split},
    "prefill first": {"order": config.Order.prefill_first, "max_num_batched_tokens": 9},
    "static": {"admission": config.Admission.static, "order": config.Order.prefill_first},
    "optimistic": {"reservation": config.Reservation.optimistic, "watermark": 0},
}


STEPS = {
    "hash": {"prefix_cache": config.PrefixCache.hash},
    "radix": {"prefix_cache": config.PrefixCache.radix},
    "overlap": {"pipeline": config.Pipeline.overlap},
    "bucketed": {"decode_shape": config.DecodeShape.bucketed},
    "fixed": {"decode_shape": config.DecodeShape.fixed},
}


def make(path, blocks=64, attention=None, step=None, **scheduler):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64} | scheduler
    return create(
        config.Engine(
            **(step or {}),
            batch_invariant=True,
            kv=config.KV(block_size=8),
            attention=config.Attention(**(attention or {})),
            scheduler=config.Scheduler(**options),
            budget=config.Budget(blocks=blocks),
        ),
        path,
    )


def logits_of(engine, names=tuple(PROMPTS), preempt_every=0):
    """Serve, and return the bytes of every request's logits, token by token."""
    seen, sample, steps = {}, sampler.sample_rows, 0

    def capture(logits, states):
        for row, state in zip(logits[: len(states)], states, strict=True):
            seen[state.request_id, state.num_tokens] = row.tobytes()
        return sample(logits, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample_rows", capture)
        for name in names:
            engine.submit(Request(name, PROMPTS[name], PARAMS))
        while engine.has_work():
            engine.step()
            engine.check()
            steps += 1
            if preempt_every and steps % preempt_every == 0:
                engine._scheduler.preempt(names[steps // preempt_every % len(names)])
    assert len(seen) == PARAMS.max_tokens * len(names)
    return seen


@pytest.fixture(scope="module")
def alone(model_dir):
    """Each request's logits when nothing else runs and its prompt is one chunk."""
    engine, seen = make(model_dir("qwen3")), {}
    for name in PROMPTS:
        seen |= logits_of(engine, (name,))
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_are_bit_equal_on_every_schedule(schedule, alone, model_dir):
    engine = make(model_dir("qwen3"), **SCHEDULES[schedule])
    assert logits_of(engine) == alone
    assert engine.counters()["batch_invariant"] == 1


@pytest.mark.parametrize("step", STEPS)
def test_logits_are_bit_equal_however_a_step_is_run(step, alone, model_dir):
    """Twice: the second time after a prefix cache has seen every prompt."""
    engine = make(model_dir("qwen3"), step=STEPS[step], chunk=7)
    assert logits_of(engine) == alone
    assert logits_of(engine) == alone
    if step in ("hash", "radix"):
        assert engine.counters()["prefix.hit_tokens"] > 0
    engine.close()


def test_logits_are_bit_equal_though_requests_are_preempted(alone, model_dir):
    engine = make(model_dir("qwen3"), blocks=9, **SCHEDULES["optimistic"])
    assert logits_of(engine) == alone
    counters = engine.counters()
    assert counters["preemptions"] > 0 and counters["tokens.recomputed"] > 0
    engine = make(model_dir("qwen3"))
    assert logits_of(engine, preempt_every=3) == alone
    assert engine.counters()["preemptions"] > 0


def test_the_comparison_can_fail(alone, model_dir):
    """Another order of summation is seen: the reference backend's."""
    assert logits_of(make(model_dir("qwen3"), attention={"backend": "reference"})) != alone


def test_a_model_on_mlx_is_refused_on_openblas(model_dir, monkeypatch):
    refused = Conversion(False, "refused for the test")
    monkeypatch.setattr(
        "labkit.engine.numpy_port.model_conversion.convert", lambda model, **_: refused
    )
    with pytest.raises(EngineError, match=r"batch_invariant=true: this model runs on MLX"):
        make(model_dir("llama"))


def test_a_forward_that_depends_on_its_batch_is_refused(model_dir, monkeypatch):
    from labkit.engine.runner.packed_forward import PackedForward

    real = PackedForward.__call__

    def uneven(self, batch, *args):
        return real(self, batch, *args) * np.float32(1 + 1e-7 * (batch.total_q % 3))

    monkeypatch.setattr(PackedForward, "__call__", uneven)
    with pytest.raises(EngineError, match="logits change with the batch"):
        make(model_dir("qwen3"))


@pytest.mark.parametrize("split", ["auto", "4"])
def test_split_keys_are_refused(split):
    with pytest.raises(config.ConfigError, match=f"split_kv={split} sums over"):
        config.Engine(batch_invariant=True, attention=config.Attention(split_kv=split))
