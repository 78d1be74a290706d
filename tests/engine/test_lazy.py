"""A step on MLX is one graph: evaluated once, no pool copied, few calls per layer."""

import sys
import weakref
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from test_paged_tokens import create_mlx, prompts, serve

import labkit
from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.attention.launch_evidence import launch_stamp
from labkit.engine.engine_protocol import StaleLaunchError
from labkit.kernel_constants import STAMP_MASK
from labkit.metal import gpu_properties

LAYERS = 3


def make_engine(path, blocks=64, make=create_mlx, **engine):
    attention = engine.pop("attention", {"backend": "gather"})
    composition = engine.pop("composition", config.Composition.mixed)
    return make(
        config.Engine(
            scheduler=config.Scheduler(
                max_num_seqs=4, max_num_batched_tokens=16, composition=composition
            ),
            kv=engine.pop("kv", config.KV(block_size=8)),
            budget=config.Budget(blocks=blocks),
            attention=config.Attention(**attention),
            **engine,
        ),
        path,
    )


def counting(real, name, counted):
    def wrapped(*arrays):
        counted[name] += 1
        return real(*arrays)

    return wrapped


@pytest.fixture
def evaluations(monkeypatch):
    """Number of MLX evaluations, by function name."""
    counted = Counter()
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, counting(getattr(mx, name), name, counted))
    return counted


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("pipeline", config.Pipeline)
def test_a_step_is_evaluated_once(name, pipeline, model_dir, plain_greedy, evaluations):
    expected = [plain_greedy(name, prompt, 12) for prompt in prompts()]
    engine = make_engine(model_dir(name), pipeline=pipeline)
    engine.reset_counters()
    evaluations.clear()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    evaluation = "eval" if pipeline is config.Pipeline.sync else "async_eval"
    counters = engine.counters()
    assert evaluations == {evaluation: counters["steps.total"]}
    assert counters["mlx.evaluations"] == counters["steps.total"] > 20
    assert counters["steps.mixed"] > 0 and counters["kernel.gather"] > 0
    assert [tokens[str(i)] for i in range(len(expected))] == expected
    if pipeline is config.Pipeline.overlap:
        assert counters["pipeline.overlapped"] > 10


def stand_in(call):
    """A Metal kernel's call by MLX's own operations, as lazy as on a Mac, stamps and all."""
    given = dict(call.inputs)
    tables, lens, starts = (
        np.asarray(given[name]) for name in ("block_tables", "seq_lens", "cu_seqlens_q")
    )
    outs = []
    for s, length in enumerate(lens.tolist()):
        q = given["q"][int(starts[s]) : int(starts[s + 1])]
        k, v = (
            given[pool][mx.array(tables[s])].reshape(1, -1, *given[pool].shape[2:])[:, :length]
            for pool in ("k_pool", "v_pool")
        )
        q, k, v = (array.transpose(0, 2, 1, 3) for array in (q[None], k, v))
        out = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=given["scale"].item(), mask="causal" if q.shape[2] > 1 else None
        )
        outs.append(out[0].transpose(1, 0, 2))
    rows = np.zeros(call.outputs[1][1], np.uint32)
    stamp = launch_stamp(given["nonce"].item(), call.name.rpartition("_")[2], "binary_search")
    rows[:, 0] = (stamp + np.arange(len(rows))) & STAMP_MASK
    return [mx.concatenate(outs), mx.array(rows) + mx.array(0, mx.uint32)]


@pytest.mark.parametrize("pipeline", config.Pipeline)
def test_a_step_through_the_metal_backend_is_evaluated_once(
    pipeline, model_dir, plain_greedy, evaluations, monkeypatch
):
    """Stamps are outputs of the graph, read after its one evaluation; a wrong one stops it."""
    from labkit.engine.attention.backends import metal_backend

    monkeypatch.setattr(
        metal_backend, "executor_for", lambda name: lambda call: faulty(stand_in(call))
    )
    monkeypatch.setattr(metal_backend, "gpu_properties", lambda *_: gpu_properties.EMULATED)
    fault = []

    def faulty(outputs):
        return [outputs[0], outputs[1] + 1] if fault else outputs

    expected = [plain_greedy("llama", prompt, 6) for prompt in prompts()]
    device = {"device": config.Device.metal}
    engine = make_engine(model_dir("llama"), make=create, attention=device, pipeline=pipeline)
    engine.reset_counters()
    evaluations.clear()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    counters = engine.counters()
    assert [tokens[str(i)] for i in range(len(expected))] == expected
    assert sum(evaluations.values()) == counters["mlx.evaluations"] == counters["steps.total"]
    assert counters["kernel.tiled"] > 0 and counters["kernel.decode"] > 0
    assert counters["device.metal"] == LAYERS * counters["steps.total"]
    fault.append(True)
    engine.submit(Request("a", (1, 2, 3), params))
    with pytest.raises(StaleLaunchError, match="layer 0: the launch left the stamp of another"):
        engine.step()
        engine.step()


@pytest.mark.parametrize("preset", ["contiguous", "padded"])
def test_contiguous_layouts_are_lazy_too(preset, model_dir, plain_greedy, evaluations):
    expected = [plain_greedy("llama", prompt, 6) for prompt in prompts()]
    layout = config.KVLayout[preset]
    engine = make_engine(
        model_dir("llama"),
        name=preset,
        kv=config.KV(layout, 8),
        attention={"backend": "sdpa"},
        composition=config.Composition.split,
        blocks=512,
    )
    engine.reset_counters()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    evaluations.clear()
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    counters = engine.counters()
    assert [tokens[str(i)] for i in range(len(expected))] == expected
    assert counters["mlx.evaluations"] == counters["steps.total"]
    # A rectangle that grows or moves is evaluated as it is made.
    moves = evaluations["eval"] - counters["steps.total"]
    assert 0 < moves <= LAYERS * len(expected) * 4 and moves % LAYERS == 0


def test_host_sampling_needs_no_second_evaluation(model_dir, evaluations):
    engine = make_engine(model_dir("llama"))
    requests = [
        Request("drawn", (1, 2, 3), SamplingParams(temperature=1.0, seed=3, max_tokens=4)),
        Request("with_logprobs", (4, 5), SamplingParams(logprobs=2, max_tokens=4)),
        Request("plain", (6,), SamplingParams(max_tokens=4)),
    ]
    engine.reset_counters()
    evaluations.clear()
    tokens, last = serve(engine, requests)
    steps = engine.counters()["steps.total"]
    assert engine.counters()["mlx.evaluations"] == steps == evaluations["eval"]
    numpy, other = serve(make_engine(model_dir("llama"), make=create, attention={}), requests)
    assert tokens == numpy
    assert last["with_logprobs"].logprobs.token == pytest.approx(
        other["with_logprobs"].logprobs.token, abs=1e-4
    )
    assert last["plain"].margin == pytest.approx(other["plain"].margin, abs=1e-3)


def test_attention_on_numpy_under_a_model_on_mlx_counts_its_crossings(model_dir, evaluations):
    engine = make_engine(model_dir("llama"), attention={})
    engine.reset_counters()
    evaluations.clear()
    serve(engine, [Request("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True))])
    counters = engine.counters()
    assert counters["mlx.evaluations"] == (LAYERS + 1) * counters["steps.total"]
    assert counters["mlx.evaluations"] == evaluations["eval"]


def test_a_model_on_numpy_counts_what_its_attention_evaluates(model_dir, evaluations):
    layout = config.KV(config.KVLayout.contiguous, 8)
    for options in ({"name": "contiguous", "kv": layout, "attention": {"backend": "sdpa"}}, {}):
        engine = make_engine(model_dir("llama"), make=create, blocks=512, **options)
        engine.reset_counters()
        evaluations.clear()
        serve(engine, [Request("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True))])
        counters = engine.counters()
        assert counters["forward.numpy"] == counters["steps.total"]
        assert counters["mlx.evaluations"] == LAYERS * counters["steps.total"]
        assert 0 <= evaluations["eval"] - counters["mlx.evaluations"] <= LAYERS  # of new memory


@pytest.mark.parametrize("pipeline", config.Pipeline)
def test_no_pool_is_copied(pipeline, model_dir):
    """Pools of 12 MiB each: one copy of one of them would be seen among what a step takes."""
    engine = make_engine(model_dir("llama"), blocks=3072, pipeline=pipeline)
    backend = engine_backend(engine)
    pool = backend.keys[0].nbytes
    assert pool == 3072 * 8 * 2 * 64 * 4
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for i, prompt in enumerate(prompts()[:4]):
        engine.submit(Request(str(i), prompt, params))
    engine.step()
    active_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    while engine.has_work():
        engine.step()
    assert mx.get_peak_memory() - active_bytes < pool / 4


def test_the_copy_check_detects_a_pending_reader(model_dir):
    """The test above can fail: a pool that somebody else holds is copied by a write."""
    engine = make_engine(model_dir("llama"), blocks=3072)
    backend = engine_backend(engine)
    engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    active_bytes, reader = mx.get_active_memory(), backend.keys[0] + 0
    mx.reset_peak_memory()
    engine.step()
    assert mx.get_peak_memory() - active_bytes > backend.keys[0].nbytes
    del reader


def engine_backend(engine):
    return engine._loop._launcher.run_model.memory.attention


OURS = str(Path(labkit.__file__).parent)  # a clone may lie in a folder of that name, too


@pytest.mark.parametrize("backend", ["gather", "fused"])
def test_four_python_calls_of_labkit_lead_to_the_kernel(backend, model_dir, monkeypatch):
    """The hook, the handle, the backend's forward; gather's attend (two), or the kernel's call."""
    deepest = []

    def counted(real):
        def wrapped(*args, **options):
            frame, depth = sys._getframe(1), 0
            while frame.f_code.co_filename.startswith(OURS):
                frame, depth = frame.f_back, depth + 1
            deepest.append(depth)
            return real(*args, **options)

        return wrapped

    if backend == "gather":
        real = mx.fast.scaled_dot_product_attention
        engine = make_engine(model_dir("llama"))
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted(real))
    else:
        from labkit.cpu.attention import kernel_entry_points

        engine = make_engine(model_dir("llama"), make=create, attention={})
        for name in ("decode", "tiled"):
            monkeypatch.setattr(
                kernel_entry_points, name, counted(getattr(kernel_entry_points, name))
            )
    serve(engine, [Request("a", (1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True))])
    # The two steps of a decode after the prompt's are replayed by one call, without Python.
    assert len(deepest) == LAYERS * (3 if backend == "gather" else 1)
    assert set(deepest) == {5 if backend == "gather" else 3}


def test_a_default_decode_step_runs_through_few_files_of_labkit():
    """What somebody reads who follows one step from the engine to the kernels."""
    from labkit.models import resolve

    model = resolve(config.Model(shape=config.ModelShape()))
    engine = create(config.Engine(), model.path)
    for i in range(3):
        engine.submit(Request(str(i), (1, 2, 3 + i), SamplingParams(max_tokens=9)))
    engine.step()
    engine.step()
    files = set()

    def note(frame, event, argument):
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            files.add(path.removeprefix(OURS))

    before = sys.gettrace()
    sys.settrace(note)
    try:
        events = engine.step()
    finally:
        sys.settrace(before)
    assert len(events) == 3 and engine.counters()["steps.decode"] == 2
    assert {
        "/engine/llm_engine.py",
        "/engine/scheduler/scheduler.py",
        "/engine/attention/backends/cpu_backend.py",
    } <= files
    assert len(files) <= 30, sorted(files)


def test_rows_with_a_nan_are_refused(model_dir):
    from labkit.engine.engine_protocol import InvalidLogitsError

    engine = make_engine(model_dir("llama"))
    engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    engine_backend(engine).values[-1][:] = mx.nan
    with pytest.raises(InvalidLogitsError, match=r"logits are not finite numbers \(request a\)"):
        engine.step()


@pytest.mark.parametrize("backend", ["gather", "gather_padded", "masked"])
def test_a_nan_does_not_outlive_the_step_that_it_ends(backend, model_dir, plain_greedy):
    """Neither in blocks that are free again, nor in the first chunk's, which are cached."""
    from labkit.engine.engine_protocol import InvalidLogitsError

    engine = make_engine(
        model_dir("llama"), attention={"backend": backend}, prefix_cache=config.PrefixCache.hash
    )
    attention, params = engine_backend(engine), SamplingParams(max_tokens=6, ignore_eos=True)
    real = attention.forward
    attention.forward = lambda layer, q, k, v, metadata: real(layer, q, k, v * mx.nan, metadata)
    engine.submit(Request("a", tuple(range(1, 30)), params))  # chunks of 16 and 13 tokens
    with pytest.raises(InvalidLogitsError):
        while engine.has_work():
            engine.step()
    attention.forward = real
    for name, prompt in {"b": (1, 2, 3), "c": tuple(range(1, 30))}.items():
        tokens, _ = serve(engine, [Request(name, prompt, params)])
        assert tokens[name] == plain_greedy("llama", prompt, 6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_device_chooses_as_the_host_does(dtype):
    from labkit.engine.sampling.sampler import greedy
    from labkit.engine.sampling.step_logits import DeviceLogits

    rng = np.random.default_rng(0)
    drawn = mx.array(rng.standard_normal((5, 300)).astype(np.float32))
    host = np.array(drawn.astype(dtype).astype(mx.float32))
    host[1, 7] = host[1, 9] = 50  # the lowest of equals
    host[2, 3] = np.nan
    host[3] = -np.inf
    host[4, 5] = np.inf
    rows = DeviceLogits(mx.array(host).astype(dtype))
    best, margins = rows.greedy()
    with np.errstate(invalid="ignore"):
        ours, theirs = greedy(host.copy())
    finite = [0, 1, 4]
    assert [best[row] for row in finite] == ours[finite].tolist()
    np.testing.assert_array_equal(margins, theirs)
    np.testing.assert_array_equal(np.asarray(rows), host)
    np.testing.assert_array_equal(rows[1], host[1])
    assert len(DeviceLogits(mx.zeros((0, 9))).greedy()[0]) == 0


@pytest.mark.parametrize("backend", ["gather", "fused"])
def test_a_model_that_is_shared_does_not_keep_an_engines_memory(backend, model_dir, collect):
    from labkit.engine.runner.shared_models import SharedModels

    models = SharedModels()
    options = config.Engine(
        budget=config.Budget(blocks=32), attention=config.Attention(backend=backend)
    )
    engine = create(options, model_dir("llama"), models)
    serve(engine, [Request("a", (1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True))])
    owner = weakref.ref(engine_backend(engine))
    assert owner() is not None
    engine.close()
    del engine
    collect()
    assert owner() is None
