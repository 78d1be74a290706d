"""``engine.dtype``: accepted and refused types, and that every engine computes in that type."""

import numpy as np
import pytest

from labkit import config
from labkit.config import (
    KV,
    Attention,
    Budget,
    Composition,
    ConfigError,
    Device,
    DType,
    Engine,
    KVLayout,
    Order,
    Weights,
)
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.model import dtype_resolution
from labkit.engine.model.dtype_resolution import WeightLoading
from labkit.engine.model.model_loader import load_model
from labkit.engine.runner.shared_models import SharedModels

HALF = ("float16", "bfloat16")
PROMPTS = [tuple(range(1, 20)), (7,), (5, 3, 250, 11, 90)]
LONG = [tuple(range(1, 251)), *PROMPTS[1:]]


def options(kind, **changes):
    chosen = {"attention": Attention(backend="gather"), "budget": Budget(blocks=32)} | changes
    scheduler = config.Scheduler(max_num_seqs=3)
    return Engine(dtype=DType(kind), scheduler=scheduler, **chosen)


def mlx_lm(kind):
    return Engine(name="mlx_lm", dtype=DType(kind), scheduler=config.Scheduler(max_num_seqs=3))


def serve(engine, prompts=PROMPTS, max_tokens=6):
    tokens = [[] for _ in prompts]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, params))
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.request_id)].append(event.token)
    return tokens


def in_type(path, source, kind):
    """A copy of a model directory, stored in another type."""
    import mlx.core as mx

    path.mkdir(exist_ok=True)
    weights = mx.load(str(source / "model.safetensors"))
    floats = {n: v for n, v in weights.items() if mx.issubdtype(v.dtype, mx.floating)}
    cast = {name: value.astype(getattr(mx, kind)) for name, value in floats.items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights | cast)
    (path / "config.json").write_text((source / "config.json").read_text())
    return path


def types_of(model):
    from mlx.utils import tree_flatten

    return {
        dtype_resolution.dtype_name(value.dtype) for _, value in tree_flatten(model.parameters())
    }


@pytest.mark.parametrize(
    ("engine", "on_a_cpu", "on_a_mac"),
    [
        (Engine(), "float32", "float32"),
        (Engine(name="mlx_lm"), "float32", None),
        (Engine(attention=Attention(backend="gather")), "float32", None),
        (Engine(attention=Attention(device=Device.metal)), "float32", None),
        (Engine(attention=Attention(device=Device.emulated)), "float32", "float32"),
        (Engine(attention=Attention(backend="reference")), "float32", "float32"),
        (Engine(dtype=DType.float32), "float32", "float32"),
        (mlx_lm("float16"), "float16", "float16"),
        (options("bfloat16"), "bfloat16", "bfloat16"),
    ],
)
def test_the_type_follows_from_the_option_and_from_where_the_model_runs(
    engine, on_a_cpu, on_a_mac, monkeypatch
):
    for gpu, kind in ((None, on_a_cpu), ("metal", on_a_mac)):
        monkeypatch.setattr(dtype_resolution, "mlx_gpu", lambda gpu=gpu: gpu)
        assert dtype_resolution.cast_target(engine) == kind


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        (Engine(), "float32"),
        (Engine(attention=Attention(backend="gather")), None),
        (Engine(attention=Attention(device=Device.cuda)), None),
        (Engine(attention=Attention(device=Device.metal)), "float32"),
        (Engine(dtype=DType.float32, attention=Attention(device=Device.cuda)), "float32"),
    ],
)
def test_the_type_on_an_nvidia_gpu(engine, kind, monkeypatch):
    monkeypatch.setattr(dtype_resolution, "mlx_gpu", lambda: "cuda")
    assert dtype_resolution.cast_target(engine) == kind


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("kind", HALF)
def test_half_precision_is_refused_where_numpy_computes(kind, backend):
    with pytest.raises(
        ConfigError, match=rf"^engine\.dtype={kind}: .*set backend=gather"
    ) as caught:
        options(kind, attention=Attention(backend=backend))
    assert "\n" not in str(caught.value)


def test_half_precision_is_not_refused_elsewhere():
    for device in (Device.metal, Device.emulated):
        assert (
            dtype_resolution.cast_target(options("float16", attention=Attention(device=device)))
            == "float16"
        )
    padded = {"kv": config.KV(layout=KVLayout.contiguous), "attention": Attention(backend="sdpa")}
    assert (
        dtype_resolution.cast_target(Engine(name="contiguous", dtype=DType.bfloat16, **padded))
        == "bfloat16"
    )


@pytest.mark.parametrize("kind", [*HALF, "float32", None])
def test_weights_are_cast_after_loading_or_left_as_stored(kind, model_dir, tmp_path):
    path = in_type(tmp_path / "half", model_dir("qwen3"), "bfloat16")
    assert types_of(load_model(path, WeightLoading(kind)).model) == {kind or "bfloat16"}


def test_quantised_weights_stay_quantised(model_dir):
    model = load_model(model_dir("quantised"), WeightLoading("float16")).model
    assert types_of(model) == {"uint32", "float16"}
    assert "Quantized" in type(model.model.layers[0].mlp.up_proj).__name__


def test_weights_that_mlx_lm_keeps_in_float32_stay_float32(model_dir):
    loaded = load_model(model_dir("qwen3")).model
    loaded.cast_predicate = lambda path: "norm" not in path
    dtype_resolution.cast_parameters(loaded, WeightLoading("float16"))
    assert types_of(loaded) == {"float16", "float32"}
    dtype_resolution.cast_parameters(loaded)
    assert types_of(loaded) == {"float32"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3", HALF[0]), ("llama", HALF[1]), ("gemma3", HALF[1]), ("quantised", HALF[0])],
)
def test_all_engines_run_in_the_configured_dtype(name, kind, model_dir):
    ours, theirs = create(options(kind), model_dir(name)), create(mlx_lm(kind), model_dir(name))
    tokens = [serve(engine) for engine in (ours, theirs)]
    for engine in (ours, theirs):
        assert engine.notes["dtype"] == kind
        counters = engine.counters()
        assert [key for key in counters if key.startswith("dtype.")] == [f"dtype.{kind}"]
    assert ours.notes["forward"] == "mlx"
    assert (
        np.equal(*tokens).mean() > 0.5
    )  # a near tie ends in another token, and what follows it differs


@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_a_layout_in_one_piece_holds_half_of_the_bytes(layout, model_dir):
    """Long enough that rows grow and move: their words are copied, whatever type they are."""

    def served(kind):
        scheduler = config.Scheduler(
            max_num_seqs=3, order=Order.prefill_first, composition=Composition.split
        )
        engine = create(
            Engine(
                name=layout,
                kv=KV(layout=KVLayout(layout)),
                attention=Attention(backend="sdpa"),
                budget=Budget(blocks=512),
                dtype=DType(kind),
                scheduler=scheduler,
            ),
            model_dir("qwen3"),
        )
        tokens = serve(engine, LONG, max_tokens=10)
        return tokens, engine.counters()

    _, whole = served("float32")
    for kind in HALF:
        tokens, counters = served(kind)
        assert counters["peak_kv_bytes"] * 2 == whole["peak_kv_bytes"]
        assert counters[f"dtype.{kind}"] == 1 and counters["kv.bytes_copied"] > 0
        theirs = serve(create(mlx_lm(kind), model_dir("qwen3")), LONG, max_tokens=2)
        # The first tokens are theirs; near ties part the rest.
        assert [t[:2] for t in tokens] == theirs


@pytest.mark.parametrize("kind", HALF)
def test_mlx_lm_in_half_precision_is_mlx_lm(kind, model_dir):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model = load_model(model_dir("llama"))[0]
    model.set_dtype(getattr(mx, kind))
    steps = generate_step(mx.array(PROMPTS[0]), model, max_tokens=6)
    assert serve(create(mlx_lm(kind), model_dir("llama")))[0] == [int(token) for token, _ in steps]


@pytest.fixture
def one_too_far(monkeypatch):
    """Positions after the fifth are wrong by one."""
    from labkit.engine.runner.input_builder import InputBuilder

    build = InputBuilder.build

    def wrong(self, output):
        batch = build(self, output)
        batch.positions[batch.positions > 4] += 1
        return batch

    monkeypatch.setattr(InputBuilder, "build", wrong)


@pytest.mark.usefixtures("one_too_far")
def test_a_wrong_attention_is_refused_with_matrices_as_stored(model_dir, monkeypatch):
    """The plain model's products are NumPy's there: MLX's own BLAS may be far slower."""
    from labkit.engine.model import dequantized_layers

    called, numpy_product = [], dequantized_layers.numpy_product

    def counted(x, layer):
        called.append(layer)
        return numpy_product(x, layer)

    monkeypatch.setattr(dequantized_layers, "numpy_product", counted)
    with pytest.raises(EngineError, match="refused by the self-test: its logits differ"):
        create(Engine(budget=Budget(blocks=32)), model_dir("quantised"))
    assert len(called) == 3 * 7 + 1  # every product of the three layers, and the output


def test_a_product_in_slabs_is_that_of_the_whole_weight(monkeypatch):
    import mlx.core as mx
    import mlx.nn as nn

    from labkit.engine.model import dequantized_layers

    monkeypatch.setattr(dequantized_layers, "SLAB_BYTES", 4 * 64 * 8)
    layer = nn.QuantizedLinear(64, 50, bits=4, group_size=32)  # six slabs, and a rest
    x = mx.random.normal((2, 3, 64))
    products = dequantized_layers.numpy_product(x, layer), layer(x)
    np.testing.assert_allclose(*map(np.asarray, products), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_too_far")
def test_a_wrong_attention_is_refused_in_half_precision_too(model_dir):
    for kind in HALF:
        with pytest.raises(EngineError, match=f"refused by the self-test: .* in {kind}"):
            create(options(kind), model_dir("llama"))


def test_on_a_cpu_a_model_stored_in_half_precision_computes_in_float32(model_dir, tmp_path):
    path = in_type(tmp_path / "half", model_dir("qwen3"), "bfloat16")
    for engine in (create(Engine(budget=Budget(blocks=32)), path), create(mlx_lm("model"), path)):
        assert engine.notes["dtype"] == "float32"
        assert engine.counters()["dtype.float32"] == 1


def test_matrices_are_held_as_stored_or_widened(model_dir, tmp_path):
    """In either way the same numbers are computed, and they are mlx_lm's on the widened model."""
    half = in_type(tmp_path / "half", model_dir("qwen3"), "bfloat16")
    for path, form in ((model_dir("quantised"), "quantised"), (half, "bfloat16")):
        engines = [create(Engine(weights=held, budget=Budget(blocks=32)), path) for held in Weights]
        for engine, expected in zip(engines, (form, "float32"), strict=True):
            assert engine.notes["forward"] == "numpy"
            counters = engine.counters()
            held = {key: n for key, n in counters.items() if key.startswith("weights.")}
            assert held.keys() == {f"weights.{expected}", "weights.narrow"}
            size = held[f"weights.{expected}"]
            assert held["weights.narrow"] == (0 if expected == "float32" else size)
            assert size > 0
        assert all(engine.notes["self_test_difference"] < 1e-5 for engine in engines)
        theirs = create(Engine(name="mlx_lm", weights=Weights.float32), path)
        tokens = serve(theirs)
        assert all(serve(engine) == tokens for engine in engines)
        assert theirs.counters()["weights.narrow"] == 0 < theirs.counters()["weights.float32"]


def test_weights_that_numpy_does_not_use_are_cast_for_mlx(tmp_path):
    from architectures import settings
    from small_models import build_model_dir

    path = in_type(
        tmp_path / "half", build_model_dir(tmp_path / "moe", settings("mixtral")), "bfloat16"
    )
    engine = create(Engine(budget=Budget(blocks=32)), path)
    assert engine.notes["forward"] == "mlx"
    weights = {k: n for k, n in engine.counters().items() if k[:8] == "weights."}
    assert (
        weights.keys() == {"weights.float32", "weights.narrow"} and weights["weights.narrow"] == 0
    )


def test_widened_weights_and_half_precision_are_refused_together():
    with pytest.raises(ConfigError, match=r"^engine\.weights=float32: engine\.dtype=float16 "):
        options("float16", weights=Weights.float32)


def test_arms_in_different_types_share_no_weights(model_dir):
    models = SharedModels()
    path = model_dir("qwen3")
    kinds = ("float32", *HALF, "float32")
    ready = [models.prepare(path, 16, Device.cpu, loading=WeightLoading(kind)) for kind in kinds]
    assert [one.expected.cached.dtype for one in ready] == list(kinds)
    assert ready[0].loaded is ready[3].loaded
    plain = [models.load_mlx_lm(path, WeightLoading(kind)) for kind in kinds]
    assert [one.dtype for one in plain] == list(kinds)
    assert plain[0] is plain[3]


def test_dtypes_that_mlx_lm_cannot_run_are_refused_with_the_reason(tmp_path):
    from architectures import settings
    from small_models import build_model_dir

    path = build_model_dir(tmp_path / "moe", settings("mixtral"))
    with pytest.raises(EngineError, match=r"model_type=mixtral: plain mlx_lm fails: \[GatherMM"):
        create(options("float16"), path)


def test_the_budget_counts_weights_in_the_configured_dtype(model_dir, tmp_path):
    from labkit.engine.memory_budget import model_footprint

    path = in_type(tmp_path / "half", model_dir("qwen3"), "bfloat16")
    full, half, own = (
        model_footprint.from_directory(path, WeightLoading(kind))
        for kind in ("float32", "float16", None)
    )
    assert full.weight_bytes == 2 * half.weight_bytes == 2 * own.weight_bytes
    assert full.activation_bytes(8, 1) == 2 * half.activation_bytes(8, 1)
    assert own.float_bytes == half.float_bytes == 2
    numbers = sum(np.prod(v.shape) for v in _parameters(model_dir("qwen3")))
    assert full.weight_bytes == 4 * numbers
    quantised = model_footprint.from_directory(model_dir("quantised"), WeightLoading("float16"))
    weight_bytes = sum(v.nbytes for v in _parameters(model_dir("quantised"), "float16"))
    assert quantised.weight_bytes == weight_bytes


@pytest.mark.parametrize("matrices", dtype_resolution.MatrixStorage)
def test_the_budget_counts_the_bytes_of_loaded_weights(matrices, model_dir, tmp_path):
    from labkit.engine.memory_budget import model_footprint

    half = in_type(tmp_path / "half", model_dir("quantised"), "bfloat16")
    plain = model_footprint.from_directory(model_dir("qwen3"))
    for path in (
        model_dir("quantised"),
        half,
        in_type(tmp_path / "q", model_dir("qwen3"), HALF[0]),
    ):
        footprint = model_footprint.from_directory(path, WeightLoading("float32", matrices))
        weight_bytes = sum(value.nbytes for value in _parameters(path, "float32", matrices))
        assert footprint.weight_bytes == weight_bytes
        assert footprint.matmul_weights == plain.matmul_weights
        assert footprint.float_bytes == 4


def _parameters(path, kind="float32", matrices=dtype_resolution.MatrixStorage.cast):
    from mlx.utils import tree_flatten

    model = load_model(path, WeightLoading(kind, matrices)).model
    return [value for _, value in tree_flatten(model.parameters())]


def test_a_plan_counts_weights_in_the_configured_dtype():
    from labkit.engine.memory_budget import model_footprint

    shape = config.ModelShape()
    full, half = (
        model_footprint.from_shape(shape, "tiny", WeightLoading(kind))
        for kind in ("float32", "bfloat16")
    )
    assert full.weight_bytes == 2 * half.weight_bytes
