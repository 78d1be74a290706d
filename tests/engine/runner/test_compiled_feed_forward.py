"""Compiled feed-forward blocks: one graph per shape, none shared between models."""

import threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from small_models import CONFIGS, build_model_dir
from test_decode_padding import serve
from test_paged_tokens import create_mlx

from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.runner import decode_padding
from labkit.engine.runner.compiled_feed_forward import CompiledBlocks

LAYERS = CONFIGS["llama"]["num_hidden_layers"]


def options(shape="bucketed", pipeline="sync", **changes):
    return config.Engine(
        scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=16),
        kv=config.KV(block_size=8),
        budget=config.Budget(blocks=64),
        decode_shape=config.DecodeShape(shape),
        pipeline=config.Pipeline(pipeline),
        **changes,
    )


def prompts(lengths=(3, 8, 17, 12)):
    rng = np.random.default_rng(4)
    return [tuple(rng.integers(0, 298, n).tolist()) for n in lengths]


def submit(engine, lengths=(6, 9, 12, 15)):
    for i, (prompt, n) in enumerate(zip(prompts(), lengths, strict=True)):
        engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=n, ignore_eos=True)))


def run(*engines):
    """Step engines in turn until all are done; return each one's tokens per request."""
    answers = [{} for _ in engines]
    while any(engine.has_work() for engine in engines):
        for engine, tokens in zip(engines, answers, strict=True):
            for event in engine.step():
                tokens.setdefault(event.request_id, []).append(event.token)
    return answers


def test_layers_without_a_feed_forward_block_are_left_alone():
    """mlx_lm's nemotron-nas has None where a layer has no block."""
    layers = [SimpleNamespace(mlp=None), SimpleNamespace(mlp=lambda x: x), SimpleNamespace()]
    assert CompiledBlocks(SimpleNamespace(layers=layers)).num_blocks == 1
    assert layers[0].mlp is None and layers[2] == SimpleNamespace()


@pytest.mark.parametrize(
    ("name", "shape", "graphs", "pipeline"),
    [
        ("llama", "bucketed", 3, config.Pipeline.sync),
        ("llama", "fixed", 1, config.Pipeline.overlap),
        ("gemma3", "bucketed", 3, config.Pipeline.overlap),
        ("gemma3", "fixed", 1, config.Pipeline.sync),
        ("quantised", "bucketed", 3, config.Pipeline.overlap),
        ("quantised", "fixed", 1, config.Pipeline.sync),
    ],
)
def test_one_graph_per_shape_and_block(name, shape, graphs, pipeline, model_dir, plain_greedy):
    """Buckets of 1, 2 and 4 rows; steps with prompt tokens use none."""
    engine = create_mlx(options(shape, pipeline), model_dir(name))
    submit(engine)
    (tokens,) = run(engine)
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy(name, prompt, 6 + 3 * i)
    counters = engine.counters()
    # The self-test ran with 2 rows, in this thread: a graph that sync finds and overlap does not.
    known = shape == "bucketed" and pipeline is config.Pipeline.sync
    assert counters["compile.count"] == LAYERS * (graphs - known)
    calls = counters["compile.count"] + counters["compile.reused"]
    assert calls == LAYERS * counters["steps.decode"] > 2 * counters["compile.count"]
    assert counters["steps.decode"] < counters["steps.total"]
    assert engine.notes["compiled_blocks"] == LAYERS
    engine.close()


@pytest.mark.parametrize(("make", "shape"), [(create_mlx, "exact"), (create, "bucketed")])
def test_nothing_is_compiled_where_shapes_have_no_bound_or_numpy_computes(make, shape, model_dir):
    engine = make(options(shape), model_dir("llama"))
    submit(engine)
    run(engine)
    assert engine.counters()["steps.decode"] > 0 and engine.notes["compiled_blocks"] == 0
    assert not [name for name in engine.counters() if name.startswith("compile.")]
    engine.close()


def test_padding_rows_change_no_bit_of_a_compiled_step(model_dir, monkeypatch):
    """Whatever token they hold, and though the null block they read and write holds NaN."""
    real, results = decode_padding.with_padding, []
    for token in (0, 123):

        def other(batch, count, token=token):
            padded = real(batch, count)
            padded.tokens[padded.total_q - count :] = token
            return padded

        monkeypatch.setattr(decode_padding, "with_padding", other)
        engine = create_mlx(options("fixed"), model_dir("llama"))
        results.append(serve(engine, prompts((3, 17, 8))))
        counters = engine.counters()
        assert counters["tokens.padded"] > 0 and counters["compile.reused"] > 0
        engine.close()
    assert results[0] == results[1]
    assert all(np.isfinite(margin) for _, _, margin in results[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models of one shape and unlike weights, with what each answers."""
    root, pairs = tmp_path_factory.mktemp("unlike"), []
    for seed in range(3):
        path = build_model_dir(root / str(seed), CONFIGS["llama"], seed)
        engine = create_mlx(options("exact"), path)
        submit(engine)
        pairs.append((path, run(engine)[0]))
        engine.close()
    assert pairs[0][1] != pairs[1][1] != pairs[2][1]
    return pairs


@pytest.mark.parametrize(
    "order", [pytest.param(("overlap", "sync"), marks=pytest.mark.slow), ("sync", "overlap")]
)
def test_engines_that_come_and_go_leave_no_graph_behind(order, models, collect):
    """A graph left behind holds its weights, and waits for a function at its address."""
    active_bytes = None
    for turn in range(4):
        path, want = models[turn % len(models)]
        engine = create_mlx(options(pipeline=order[turn % 2]), path)
        submit(engine)
        assert run(engine) == [want]
        if turn % 3:  # else it is dropped as it is
            engine.close()
        del engine
        collect()
        active_bytes = mx.get_active_memory() if active_bytes is None else active_bytes
        assert mx.get_active_memory() <= active_bytes


@pytest.mark.parametrize("pipelines", [("sync", "sync"), ("overlap", "sync"), ("sync", "overlap")])
def test_two_engines_side_by_side(pipelines, models):
    chosen = models[:2]
    engines = [
        create_mlx(options(pipeline=pipeline), path)
        for pipeline, (path, _) in zip(pipelines, chosen, strict=True)
    ]
    for engine in engines:
        submit(engine)
    assert run(*engines) == [want for _, want in chosen]
    for engine in engines:
        assert engine.counters()["compile.reused"] > 0
        engine.close()


def test_a_block_called_in_two_threads_leaves_no_graph_behind_in_either():
    """MLX itself forgets only those of the last thread."""
    x = mx.ones((2, 8))
    mx.eval(x)
    wrong = []
    for k in range(1, 12):
        layer = SimpleNamespace(mlp=lambda a, k=k: a * k)
        blocks, counters = CompiledBlocks(SimpleNamespace(layers=[layer])), Counters()
        blocks.enabled = True

        def call(layer=layer, k=k):
            output = layer.mlp(mx.ones((2, 8)))
            mx.eval(output)
            if not np.array_equal(output, np.full((2, 8), k)):
                wrong.append(k)

        call()
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        blocks.count(counters)
        assert counters.as_dict() == {"compile.count": 2, "compile.reused": 1}
        del layer, blocks, call, thread
    assert not wrong


@pytest.mark.parametrize("first_wrong_call", [1, 2])
def test_the_self_test_refuses_blocks_that_compute_something_else(
    first_wrong_call, model_dir, monkeypatch
):
    def miscompile(block):
        calls = 0

        def run(x):
            nonlocal calls
            calls += 1
            return block(x) * (1.01 if calls >= first_wrong_call else 1)

        return run

    create_mlx(options(), model_dir("llama")).close()  # mlx_lm's own functions are compiled
    monkeypatch.setattr(mx, "compile", miscompile)
    with pytest.raises(EngineError, match="logits differ from plain mlx_lm's"):
        create_mlx(options(), model_dir("llama"))


def test_a_block_that_cannot_be_traced_is_refused_with_the_reason(model_dir, monkeypatch):
    from labkit.engine.model.model_loader import _module

    llama = _module("llama")
    real = llama.MLP.__call__

    def looks(self, x):
        return real(self, x) if x.max().item() < np.inf else x

    monkeypatch.setattr(llama.MLP, "__call__", looks)
    create_mlx(options("exact"), model_dir("llama")).close()
    with pytest.raises(EngineError, match=r"refused by the self-test: .*compile"):
        create_mlx(options(), model_dir("llama"))
