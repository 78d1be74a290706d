"""Two ranks give the tokens of one process, under all that a scheduler does."""

import json
import os
import re
import shutil
import signal

import numpy as np
import psutil
import pytest
from process_state import running

from labkit.config import (
    KV,
    Attention,
    Budget,
    Engine,
    PrefixCache,
    Reservation,
    Scheduler,
    TensorParallel,
)
from labkit.engine import LLM, Request, SamplingParams, create
from labkit.engine.engine_factory import create_rank
from labkit.engine.engine_protocol import EngineError, LengthLimited
from labkit.engine.parallel import rank_processes
from labkit.engine.parallel.mlx_ring import Ring
from labkit.engine.parallel.rank_messages import RankFailure
from labkit.engine.step_loop import NoScheduleCheck
from labkit.server.constraints.min_tokens import MinTokensConstraint

SHARED = tuple(range(60, 84))
# Ragged, three with a beginning in common, one sampled; the pool holds not even half of them.
PROMPTS = [(7,), (*SHARED, 1), tuple(range(5, 46)), (*SHARED, 2, 3, 4), (*SHARED,), (9, 120, 11)]
SAMPLED = 5


def options(size, **changes):
    chosen = {
        "scheduler": Scheduler(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            chunk=10,
            reservation=Reservation.optimistic,
            watermark=0,
        ),
        "kv": KV(block_size=8),
        "budget": Budget(blocks=17),
        "prefix_cache": PrefixCache.hash,
    }
    return Engine(parallel=TensorParallel(size), **chosen | changes)


def serve(engine, outputs=18):
    """Serve the prompts, one aborted on the way; return tokens and margins by request."""
    tokens, margins = {}, {}
    for index, prompt in enumerate(PROMPTS):
        heat = 0.8 if index == SAMPLED else 0.0
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=heat, seed=index)
        engine.submit(Request(str(index), prompt, params))
    engine.submit(Request("aborted", (1, 2, 3), SamplingParams(max_tokens=99)))
    for _ in range(3):
        collect(engine.step(), tokens, margins)
    engine.abort("aborted")
    while engine.has_work():
        collect(engine.step(), tokens, margins)
    return tokens, margins


def collect(events, tokens, margins):
    for event in events:
        assert event.error is None, event.error
        tokens.setdefault(event.request_id, []).append(event.token)
        margins.setdefault(event.request_id, []).append(event.margin)


def both(path, begin=lambda engine: None, end=lambda engine: engine.close(), **changes):
    """Return tokens, margins and counters of one process and of two ranks."""
    results, limits = [], []
    for size in (1, 2):
        engine = create(options(size, **changes), path)
        pids = engine._ranks.pids if size > 1 else []
        try:
            if size > 1:
                begin(engine)
            assert isinstance(engine, LengthLimited)
            results.append((*serve(engine), engine.counters()))
            assert engine.computed_tokens() == results[-1][2]["tokens.computed"] > 0
            limits.append(engine.max_request_tokens())
            assert not engine.kv_bytes().reserved and not engine.is_running("0")
            notes = engine.notes
            if size > 1:
                end(engine)
        finally:
            engine.close()
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))
    digests = notes["schedule_digests"].split("; ")
    assert [text.split(": ")[0] for text in digests] == ["rank 0", "rank 1"]
    assert len({text.split(": ")[1] for text in digests}) == 1
    assert limits[0] == limits[1] > 17
    return results


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_tokens_and_the_schedule_are_those_of_one_process(model_dir, kind):
    (tokens, margins, one), (same_tokens, near, two) = both(model_dir(kind))
    assert tokens == same_tokens and set(tokens) >= {str(i) for i in range(len(PROMPTS))}
    # Not by luck: no greedy choice was nearly a tie for what another order of summation changes.
    greedy = [str(index) for index in range(len(PROMPTS)) if index != SAMPLED]
    ours, theirs = (
        np.array([m for g in greedy for m in results[g]]) for results in (margins, near)
    )
    assert 0 < np.abs(ours - theirs).max() < ours.min() / 10
    # All that makes schedules hard has happened, in both alike.
    for counter in ("preemptions", "prefix.hit_tokens", "tokens.recomputed", "steps.mixed"):
        assert one[counter] == two[counter] > 0, counter
    for counter in ("steps.total", "tokens.computed", "blocks.allocated", "requests.aborted"):
        assert one[counter] == two[counter], counter
    assert one["ranks.1"] == two["ranks.2"] == two["ranks.agreed"] == two["steps.total"]
    assert two["ranks.sums"] == 2 * 3 * two["steps.total"]  # twice in each of three layers
    assert "ranks.2" not in one and "ranks.agreed" not in one
    assert two["forward.numpy"] == two["steps.total"]
    # A rank holds its own heads, and all ranks together what one process holds.
    assert (one["ranks.kv_heads"], two["ranks.kv_heads"]) == (2, 1)
    assert one["peak_kv_bytes"] == two["peak_kv_bytes"] > 0
    assert one["weights.float32"] < two["weights.float32"] < 2 * one["weights.float32"]
    assert two["step_ms"] > two["host_ms"] > 0


class Compiled:
    """Not to be pickled, as a compiled grammar."""

    def __reduce__(self):
        raise TypeError("cannot pickle 'builtins.LLMatcher' object")


class Foreign:
    """Pickled, but not to be unpickled in a rank, as a class of the caller's ``__main__``."""

    def __reduce__(self):
        return int, ("foreign",)


def test_a_constraint_that_cannot_be_sent_ends_its_own_request_alone(model_dir):
    constraints = {
        "compiled": Compiled(),
        "foreign": Foreign(),
        "forbids": MinTokensConstraint(99, [0]),
        "none": None,
    }
    engine = create(options(2), model_dir("qwen3"))
    try:
        for _ in range(2):  # the ids can be used again
            for name, constraint in constraints.items():
                params = SamplingParams(max_tokens=3, ignore_eos=True, constraint=constraint)
                engine.submit(Request(name, (5, 6, 7), params))
            events = []
            while engine.has_work():
                events += engine.step()
            errors = {event.request_id: event.error for event in events if event.error}
            assert set(errors) == {"compiled", "foreign"}
            assert "ranks (TypeError: cannot pickle 'builtins.LLMatcher' obj" in errors["compiled"]
            assert "ranks (ValueError: invalid literal for int() with" in errors["foreign"]
            tokens = [event.request_id for event in events if not event.error]
            assert sorted(tokens) == ["forbids"] * 3 + ["none"] * 3
            assert all(map(running, engine._ranks.pids))
        assert engine.counters()["requests.refused"] == 4
    finally:
        engine.close()


def interrupt_ranks(engine):
    """Interrupt the ranks as a terminal does, which sends the signal to all processes at once."""
    for pid in engine._ranks.pids:
        os.kill(pid, signal.SIGINT)


def interrupt_engine(engine):
    """Interrupt a step, which ends the ranks."""
    pids = engine._ranks.pids
    assert all(map(running, pids))
    engine.submit(Request("again", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))

    def interrupted(pipes, seconds):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not any(map(running, pids))


def test_a_forward_on_mlx_sums_inside_its_graph_and_ranks_ignore_sigint(tmp_path):
    from architectures import COMMON
    from small_models import build_model_dir

    path = build_model_dir(tmp_path / "moe", {**COMMON, "model_type": "qwen3_moe"})
    (tokens, _, one), (same, _, two) = both(
        path, interrupt_ranks, interrupt_engine, attention=Attention(backend="gather")
    )
    assert tokens == same
    assert one["kernel.gather"] == two["kernel.gather"] > 0
    assert one["forward.mlx"] == two["forward.mlx"] == two["ranks.agreed"]
    assert two["ranks.sums"] == 2 * 2 * two["steps.total"]


def test_the_pools_of_windows_and_quantised_weights_are_those_of_one_process(tmp_path):
    """Bits that do not depend on the batch, too."""
    from small_models import CONFIGS, build_model_dir

    kinds = ["sliding_attention", "full_attention"]
    settings = {**CONFIGS["llama"], "num_hidden_layers": 2, "layer_types": kinds}
    settings |= {"sliding_window": 12, "intermediate_size": 128}
    quantization = CONFIGS["quantised"]["quantization"]
    path = build_model_dir(tmp_path / "windows", {**settings, "quantization": quantization})
    pools = {"kv": KV(block_size=8, window_pools=True), "prefix_cache": PrefixCache.none}
    (tokens, _, one), (same, _, two) = both(path, batch_invariant=True, **pools)
    assert tokens == same
    for counter in ("window_pools.freed_blocks", "window_pools.peak_blocks", "preemptions"):
        assert one[counter] == two[counter] > 0, counter
    assert one["peak_kv_bytes"] == two["peak_kv_bytes"] > 0
    for counter in ("weights.quantised", "activations.float32"):
        assert one[counter] < two[counter] < 2 * one[counter], counter
    assert one["batch_invariant"] == two["batch_invariant"] == 1


def test_the_llm_class_starts_and_stops_ranks(tmp_path_factory):
    from labkit.config import Model, ModelShape
    from labkit.models import resolve

    shape = ModelShape(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=512)
    path = resolve(Model(name="ranks_test", shape=shape)).path
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    texts = {}
    for size in (1, 2):
        with LLM(path, max_num_seqs=2, blocks=64, parallel_size=size) as llm:
            texts[size] = [out.text for out in llm.generate(["One", "And two more"], params)]
            assert llm.counters()[f"ranks.{size}"] > 0
    assert texts[1] == texts[2]


def test_a_model_without_divisible_heads_is_one_line(tmp_path, model_dir):
    path = shutil.copytree(model_dir("qwen3"), tmp_path / "three")
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "num_key_value_heads": 3}))
    with pytest.raises(EngineError, match=r"size=2: three: num_key_value_heads=3 is not a mult"):
        create(options(2), path)
    # 96 columns of the feed-forward part in groups of 32: a rank would have one and a half.
    with pytest.raises(EngineError, match="is 48, not a multiple of the quantisation group of 32"):
        create(options(2), model_dir("quantised"))


def test_an_architecture_that_mlx_lm_cannot_shard_is_named_with_the_rank(model_dir):
    """As a rank does it, whose failure is sent to the run's process."""
    with pytest.raises(EngineError) as caught:
        create_rank(options(2), model_dir("gemma3"), Ring(2, None), NoScheduleCheck())
    error = RankFailure.from_exception(caught.value).to_exception(1)
    assert type(error) is EngineError
    assert re.match(r"rank 1: .*gemma3_text: mlx_lm cannot shard", str(error))
