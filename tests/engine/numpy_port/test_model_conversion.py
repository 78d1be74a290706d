"""Unedited mlx_lm models on NumPy arrays: equal to plain mlx_lm, or refused and untouched."""

import importlib
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from labkit.engine.numpy_port.model_conversion import convert

VOCABULARY = 99
TOLERANCE = 1e-4

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "rope_theta": 10_000.0,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GRANITE = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
    "mlp_bias": False,
}
ARCHITECTURES = {
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3-rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama-traditional": ("llama", {"rope_traditional": True, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "gemma": ("gemma", {"num_key_value_heads": 1}),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16},
    ),
    "olmo2": ("olmo2", {"tie_word_embeddings": False}),
    "granite": ("granite", GRANITE),
    "starcoder2": ("starcoder2", {}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {}),
}
REFUSED = {
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "argpartition",
    ),
    "dynamic-rope": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "DynamicNTKScalingRoPE",
    ),
}


def build(kind, extra, seed=0):
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    arguments = module.ModelArgs.from_dict({"model_type": kind, **BASE, **extra})
    mx.random.seed(seed)
    model = module.Model(arguments)
    # Random matrices at mlx_lm's own scale give nearly constant logits.
    model.update(tree_map(lambda p: 3 * p if p.ndim == 2 else p, model.parameters()))
    if kind == "gemma3_text":
        model.sanitize({})
    model.eval()
    mx.eval(model.parameters())
    return model


class FullContext:
    """A cache whose handle attends over one sequence's tokens of this forward."""

    def __init__(self, tokens, window, start=0):
        self.offset = np.arange(start, start + tokens, dtype=np.int32)
        self.window = window

    def make_mask(self, *_args, **_options):
        return None

    def update_and_fetch(self, keys, values):
        assert isinstance(keys, np.ndarray)
        assert keys.shape[2] == 1
        handle = Attending(keys[:, :, 0], values[:, :, 0], self.window)
        return handle, handle


class Attending:
    def __init__(self, keys, values, window):
        self.keys, self.values, self.window = keys, values, window

    def attend(self, queries, _values, scale, mask, sinks):
        assert mask is None
        assert sinks is None
        group = queries.shape[1] // self.keys.shape[1]
        keys, values = np.repeat(self.keys, group, 1), np.repeat(self.values, group, 1)
        logits = np.einsum("qhd,khd->hqk", queries[:, :, 0], keys) * scale
        index = np.arange(len(queries))
        seen = index[:, None] >= index
        if self.window is not None:
            seen &= index[:, None] - index < self.window
        logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values)[:, :, None].astype(np.float32)


def windows_of(model):
    caches = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    return [getattr(cache, "max_size", None) for cache in caches]


def plain_logits(model, ids):
    return np.array(model(mx.array(ids)[None])[0])


def numpy_logits(model, ids, windows):
    caches = [FullContext(len(ids), window) for window in windows]
    logits = model(ids[:, None].astype(np.int32), cache=caches)
    assert isinstance(logits, np.ndarray)
    return logits[:, 0]


def some_ids(count=21, seed=3):
    return np.random.default_rng(seed).integers(0, VOCABULARY, count)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_plain_mlx_lm_s(name):
    model = build(*ARCHITECTURES[name])
    ids, windows = some_ids(), windows_of(model)
    expected = plain_logits(model, ids)
    report = convert(model)
    assert report.ok, report.reason
    actual = numpy_logits(model, ids, windows)
    assert np.abs(actual - expected).max() / np.ptp(expected) < TOLERANCE


def test_the_layers_are_counted():
    report = convert(build("qwen3", {}))
    assert report.reason is None
    assert report.layers == {"Embedding": 1, "Linear": 21, "RMSNorm": 13, "RoPE": 3}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_counterpart_is_refused_and_unchanged(name):
    kind, extra, reason = REFUSED[name]
    model = build(kind, extra)
    ids = some_ids()
    before = plain_logits(model, ids)
    report = convert(model)
    assert not report.ok
    assert reason in report.reason
    assert "\n" not in report.reason
    np.testing.assert_array_equal(plain_logits(model, ids), before)


def test_quantised_layers_are_refused():
    model = build("llama", {})
    nn.quantize(model, group_size=32, bits=4)
    report = convert(model)
    assert not report.ok
    assert "quantised" in report.reason


def low_precision_and_dequantized(kind, bits):
    """A model's matrices in less than float32, and the same ones widened."""
    from labkit.engine.model import dequantized_layers

    model, wide = (build("llama", {"attention_bias": True}) for _ in range(2))
    for one in (model, wide):
        if kind == "quantised":
            # Of q, k and v only two lie alike, and the embedding has its own number of bits.
            nn.quantize(one.model, 32, bits, class_predicate=_some_bits(bits))
        else:
            matrices = dequantized_layers.matrix_parameter_names(one)
            cast = [(n, v.astype(getattr(mx, kind))) for n, v in parameters(one) if n in matrices]
            one.load_weights(cast, strict=False)
    dequantized_layers.dequantize_matrices(wide)
    wide.set_dtype(mx.float32)
    return model, wide


def _some_bits(bits):
    def chosen(path, layer):
        if not hasattr(layer, "to_quantized"):
            return False
        return {"bits": 8, "group_size": 32} if path.endswith(("v_proj", "tokens")) else True

    return chosen


def parameters(model):
    return tree_flatten(model.parameters())


@pytest.mark.parametrize(("kind", "bits"), [("quantised", 4), ("float16", 0), ("bfloat16", 0)])
def test_low_precision_matrices_give_the_bits_of_dequantized_ones(kind, bits):
    model, wide = low_precision_and_dequantized(kind, bits)
    ids, windows = some_ids(), windows_of(wide)
    plain = plain_logits(wide, ids)
    assert convert(wide).ok
    expected = numpy_logits(wide, ids, windows)
    assert np.abs(expected - plain).max() / np.ptp(plain) < TOLERANCE
    report = convert(model, low_precision=True)
    assert report.ok, report.reason
    assert set(report.weights) == {kind}
    np.testing.assert_array_equal(numpy_logits(model, ids, windows), expected)


def test_an_unsupported_quantisation_is_refused():
    model = build("llama", {})
    nn.quantize(model, group_size=32, bits=4)
    model.model.embed_tokens.group_size = 16
    report = convert(model, low_precision=True)
    assert "affine, 4 bits in groups of 16" in report.reason


def test_half_precision_is_refused():
    model = build("llama", {})
    model.set_dtype(mx.bfloat16)
    report = convert(model)
    assert not report.ok
    assert "bfloat16" in report.reason
    assert "float32" in report.reason


def test_mlx_and_numpy_engines_live_side_by_side():
    module = importlib.import_module("mlx_lm.models.gemma3_text")
    names = dict(vars(module))
    layers = dict(vars(nn.Linear))
    plain, converted = build(*ARCHITECTURES["gemma3_text"]), build(*ARCHITECTURES["gemma3_text"])
    ids, windows = some_ids(), windows_of(plain)
    before = plain_logits(plain, ids)
    assert convert(converted).ok
    # The module that mlx_lm's own models use is untouched ...
    assert dict(vars(module)) == names
    assert dict(vars(nn.Linear)) == layers
    assert sys.modules["mlx_lm.models.gemma3_text"] is module
    # ... so that both run, in turns.
    for _ in range(2):
        actual = numpy_logits(converted, ids, windows)
        assert np.abs(actual - before).max() / np.ptp(before) < TOLERANCE
        np.testing.assert_array_equal(plain_logits(plain, ids), before)


def test_two_converted_models_do_not_share_weights():
    first, second = build("qwen3", {}, seed=0), build("qwen3", {}, seed=1)
    ids, windows = some_ids(), windows_of(first)
    expected = plain_logits(first, ids), plain_logits(second, ids)
    assert convert(first).ok
    assert convert(second).ok
    for model, logits in zip((first, second), expected, strict=True):
        actual = numpy_logits(model, ids, windows)
        assert np.abs(actual - logits).max() / np.ptp(logits) < TOLERANCE


def test_no_mlx_operation_runs_in_a_converted_forward(monkeypatch):
    model = build(*ARCHITECTURES["gemma3_text"])
    ids, windows = some_ids(), windows_of(model)
    assert convert(model).ok

    def forbidden(*_args, **_options):
        raise AssertionError("an MLX operation ran")

    for name in ("array", "matmul", "eval", "exp", "multiply", "add", "sigmoid"):
        monkeypatch.setattr(mx, name, forbidden)
    for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
        monkeypatch.setattr(mx.fast, name, forbidden)
    assert np.isfinite(numpy_logits(model, ids, windows)).all()


def test_converted_models_of_one_class_have_modules_of_their_own():
    first, second = build("qwen3", {}), build("qwen3", {})
    assert convert(first).ok
    assert convert(second).ok
    assert type(first) is not type(second)
    assert type(first).__call__.__globals__ is not type(second).__call__.__globals__
    # Models that one loader loaded are of modules that know each other.
    inner = type(first.model).__call__.__globals__
    assert inner is type(first).__call__.__globals__


def groups_of(model):
    from labkit.engine.numpy_port.numpy_layers import GroupedLinear

    for layer in model.layers:
        for part in (layer.self_attn, layer.mlp):
            yield from {m._group for m in vars(part).values() if isinstance(m, GroupedLinear)}


def test_a_model_keeps_nothing_of_a_step():
    model = build("qwen3", {})
    ids, windows = some_ids(), windows_of(model)
    assert convert(model).ok
    numpy_logits(model, ids, windows)
    groups = list(groups_of(model))
    assert len(groups) == 6
    for group in groups:
        assert group._input is None
        assert not any(part is not None for part in group._ready)


def test_a_failed_forward_does_not_change_the_next():
    model = build("qwen3", {})
    ids, windows = some_ids(), windows_of(model)
    expected = plain_logits(model, ids)
    assert convert(model).ok

    class Failing(FullContext):
        def update_and_fetch(self, keys, values):
            raise OSError

    with pytest.raises(OSError):
        model(ids[:, None].astype(np.int32), cache=[Failing(len(ids), w) for w in windows])
    actual = numpy_logits(model, ids, windows)
    assert np.abs(actual - expected).max() / np.ptp(expected) < TOLERANCE


def test_embeddings_and_norms_are_views_of_mlx_arrays():
    model = build("llama", {"tie_word_embeddings": False})
    before = [
        np.asarray(model.model.embed_tokens.weight), np.asarray(model.model.norm.weight),
    ]  # fmt: skip
    assert convert(model).ok
    assert np.shares_memory(model.model.embed_tokens.weight, before[0])
    assert np.shares_memory(model.model.norm.keywords["weight"], before[1])


def test_a_tied_embedding_is_stored_once():
    model = build("llama", {})
    table = np.array(model.model.embed_tokens.weight)
    report = convert(model)
    matrices = sum(v.size for n, v in tree_flatten(build("llama", {}).parameters()) if v.ndim == 2)
    padded = report.weights["float32"] / 4 / matrices  # panels are as wide as a register tile
    assert 1 <= padded < 1.3
    np.testing.assert_array_equal(model.model.embed_tokens.weight, table)
    ids = np.array([[5], [0], [VOCABULARY - 1]])
    np.testing.assert_array_equal(model.model.embed_tokens(ids), table[ids])
    with pytest.raises(IndexError):
        model.model.embed_tokens(np.array([[VOCABULARY]]))


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "llama-traditional"])
def test_a_token_has_the_same_bits_in_any_batch(name):
    # Each token attends to itself alone, so that only the batch differs.
    class Alone(FullContext):
        def update_and_fetch(self, keys, values):
            handle = SelfOnly(values)
            return handle, handle

    class SelfOnly:
        def __init__(self, values):
            self.values = values

        def attend(self, queries, _values, scale, mask, sinks):
            return np.repeat(self.values, queries.shape[1] // self.values.shape[1], axis=1)

    model = build(*ARCHITECTURES[name])
    windows = windows_of(model)
    assert convert(model).ok
    ids = some_ids(300)

    def logits(start, stop):
        caches = [Alone(stop - start, window, start) for window in windows]
        return model(ids[start:stop, None].astype(np.int32), cache=caches)[:, 0]

    everything = logits(0, 300)
    for start, stop in [(0, 1), (5, 6), (0, 2), (3, 6), (0, 7), (17, 87), (0, 257)]:
        np.testing.assert_array_equal(logits(start, stop), everything[start:stop])


def test_projections_of_different_inputs_are_not_fused():
    from labkit.cpu.runtime.aligned_memory import SlabAllocator
    from labkit.engine.numpy_port.numpy_layers import GroupedLinear, Linear, ProjectionGroup

    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((n, 8)).astype(np.float32) for n in (4, 6)]
    group = ProjectionGroup(weights, [None, None], SlabAllocator(), "float32")
    first, second = (GroupedLinear(group, i) for i in range(2))
    alone = [Linear(weight, None, SlabAllocator(), "float32") for weight in weights]
    a, b = rng.standard_normal((2, 3, 1, 8)).astype(np.float32)
    for layer, single, x in [
        (first, alone[0], a),
        (second, alone[1], b),
        (first, alone[0], b),
        (first, alone[0], b),
        (second, alone[1], b),
        (second, alone[1], a),
    ]:
        np.testing.assert_array_equal(layer(x), single(x))
