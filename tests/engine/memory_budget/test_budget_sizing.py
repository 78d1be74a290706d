"""Pool sizing in the worker: measured activations, KV shapes, refusals at load, admission."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from architectures import SERVED, settings
from budget_cases import GIB, MIB, MODEL, mac
from small_models import build_model_dir

from labkit import config
from labkit.engine import EngineError, Request, SamplingParams, create, memory_budget
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.memory_budget import model_footprint, pool_sizing
from labkit.machine.facts.memory_capacity import MemoryProfile
from labkit.machine.facts.simulated_macs import simulated_mac

TINY = config.ModelShape()  # the default model: 6 M weights, 8 KiB of KV per token


def options(**budget):
    return config.Engine(
        attention=config.Attention(backend="reference"),
        scheduler=config.Scheduler(max_num_seqs=4, max_num_batched_tokens=64),
        budget=config.Budget(**budget),
    )


@pytest.fixture(scope="module")
def tiny_dir():
    from labkit.models import resolve

    return resolve(config.Model(shape=TINY)).path


def test_the_footprint_of_a_shape_equals_that_of_the_built_directory(tiny_dir):
    planned, footprint = (
        model_footprint.from_shape(TINY, "tiny"),
        model_footprint.from_directory(tiny_dir),
    )
    assert footprint == dataclasses.replace(planned, name=tiny_dir.name)
    assert model_footprint.from_model(config.Model(shape=TINY)) == planned
    assert model_footprint.from_model(config.Model(path=str(tiny_dir))) == footprint


def test_experts_that_a_token_does_not_use_multiply_nothing():
    from labkit.models import resolve

    shape = config.ModelShape(full_attention_interval=2, num_experts=8)
    path, planned = resolve(config.Model(shape=shape)).path, model_footprint.from_shape(shape, "")
    footprint = model_footprint.from_directory(path)
    assert footprint.weights == planned.weights
    assert footprint.matmul_weights == planned.matmul_weights


def loaded_bytes(path):
    """Return the bytes of the loaded weights, and those of the embedding alone."""
    from mlx.utils import tree_flatten

    from labkit.engine.model.model_loader import load_model

    tensor_bytes = {
        name: value.nbytes for name, value in tree_flatten(load_model(path).model.parameters())
    }
    (embedding,) = (size for name, size in tensor_bytes.items() if "embed_tokens" in name)
    return sum(tensor_bytes.values()), embedding


@pytest.mark.parametrize(("name", "tied"), [("qwen3", True), ("llama", False)])
def test_counted_weights_are_those_of_the_loaded_model(name, tied, model_dir):
    weight_bytes, embedding = loaded_bytes(model_dir(name))
    footprint = model_footprint.from_directory(model_dir(name))
    assert footprint.weight_bytes == weight_bytes
    assert footprint.lookup_weights == (0 if tied else embedding // 4)
    assert footprint.matmul_weights == weight_bytes // 4 - footprint.lookup_weights


def test_a_stored_output_matrix_of_a_tied_model_is_not_counted(model_dir, tmp_path):
    """mlx_lm drops the matrix, which some directories store although it is tied."""
    import mlx.core as mx

    weights = mx.load(str(model_dir("qwen3") / "model.safetensors"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text((model_dir("qwen3") / "config.json").read_text())
    footprint = model_footprint.from_directory(tmp_path)
    assert (
        footprint.weight_bytes == loaded_bytes(tmp_path)[0] == loaded_bytes(model_dir("qwen3"))[0]
    )
    assert footprint.lookup_weights == 0


def test_the_planned_memory_is_the_memory_of_the_run(tiny_dir):
    """The estimated weights equal the built model's, embedding and output matrix included."""
    from labkit.workload.requests.request_workload_kind import PROCESS_BYTES, RequestKind

    class OneRequest:
        def lengths(self, experiment):
            return ((300, 40),)

    experiment = config.Experiment(
        model=config.Model(shape=TINY), ablation=config.Ablation(arms={"base": {}})
    )
    kv = -(-340 // 16) * 16 * model_footprint.from_shape(TINY, "tiny").kv_bytes_per_token
    estimate = RequestKind(OneRequest()).estimate(experiment)
    assert estimate.bytes == PROCESS_BYTES + loaded_bytes(tiny_dir)[0] + kv


@pytest.mark.parametrize("name", sorted(SERVED))
def test_a_known_cache_is_that_of_the_loaded_model(name, tmp_path):
    """The config.json has only what the architecture reads of it."""
    from labkit.engine.model.cache_shapes import cache_shapes
    from labkit.engine.model.model_loader import _module, load_model

    path = build_model_dir(tmp_path, settings(name))
    known = {*_module(name).ModelArgs.__dataclass_fields__, "model_type"}
    own = {key: value for key, value in settings(name).items() if key in known}
    (path / "config.json").write_text(json.dumps(own))
    footprint = model_footprint.from_directory(path)
    if footprint is not None and footprint.is_cache_known:
        shapes = cache_shapes(load_model(path))
        assert footprint.kv_bytes_per_token == sum(one.token_bytes() for one in shapes.attention)
        assert not shapes.states


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_budget_is_checked_before_loading_if_the_cache_is_known(name, tmp_path):
    path = build_model_dir(tmp_path, settings(name))
    (path / "tokenizer.json").write_text("{}")
    small = MemoryProfile("small", total=GIB, available=GIB, working_set=GIB, metal=False)
    large = options(blocks=1 << 18)  # 2 GiB if each layer has keys and values
    arm = config.Experiment(
        model=config.Model(path=str(path)), engine=large, ablation=config.Ablation(arms={"a": {}})
    )
    if name == "llama":
        assert memory_budget.plan_for_arm(arm).block_bytes == 16 * 512
        with pytest.raises(EngineError, match=r"blocks=262144: it asks for 2\.00 GiB; .* or less$"):
            pool_sizing.check_before_loading(large, path, small)
    else:
        assert memory_budget.plan_for_arm(arm) is None
        pool_sizing.check_before_loading(large, path, small)


def test_unreadable_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(config.ConfigError, match=r"cannot be read$"):
        model_footprint.from_weights(tmp_path)


def test_half_precision_weights_are_counted_as_loaded(tmp_path):
    header = {
        "__metadata__": {"format": "mlx"},
        "a": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]},
        "b": {"dtype": "F32", "shape": [7], "data_offsets": [30, 58]},
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(58)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert model_footprint.from_weights(tmp_path).weight_bytes == 4 * (15 + 7)


def test_an_incomplete_config_gives_no_footprint(tiny_dir, tmp_path):
    settings = json.loads((tiny_dir / "config.json").read_text())
    latent = {**settings, "kv_lora_rank": 512}
    # head_dim is hidden_size / num_attention_heads if it is 0 or missing
    headless = {**settings, "num_attention_heads": 0, "head_dim": 0}
    infinite = {**settings, "hidden_size": math.inf}
    del settings["intermediate_size"]
    for incomplete in (settings, latent, headless, infinite):
        (tmp_path / "config.json").write_text(json.dumps(incomplete))
        assert model_footprint.from_directory(tmp_path) is None
    for text in ("{", "[]", '"words"', "{}"):
        (tmp_path / "config.json").write_text(text)
        assert model_footprint.from_directory(tmp_path) is None
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    assert model_footprint.from_directory(tmp_path).weight_bytes == 0
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert model_footprint.from_directory(tmp_path) is None
    assert model_footprint.from_directory(tmp_path / "none") is None


@pytest.mark.parametrize("drafts", [{"draft_path": "llama"}, {"draft_layers": 2}, {}])
def test_a_budget_holds_the_weights_and_the_cache_of_a_draft_model(drafts, model_dir):
    """The parent plans the pool that the worker allocates."""
    path = model_dir("qwen3")
    if "draft_path" in drafts:
        drafts = {"draft_path": str(model_dir(drafts["draft_path"]))}
    budget = {"policy": config.BudgetPolicy.mistralrs, "fraction": 0.01, "machine": "sim_m1_8gb"}
    alone = options(**budget)
    drafted = dataclasses.replace(
        alone, speculation=config.Speculation.draft, drafts=config.Drafts(**drafts)
    )
    without, planned = (
        memory_budget.plan(engine, memory_budget.footprint(engine, path))
        for engine in (alone, drafted)
    )
    assert [part.name for part in planned.parts[:2]] == ["weights", "weights of the draft model"]
    layers = drafts.get("draft_layers", 3)
    assert planned.block_bytes * 3 == without.block_bytes * (3 + layers)
    assert sum(part.bytes for part in planned.parts) <= planned.ceiling == without.ceiling
    engine = create(drafted, path)
    assert engine.notes["budget"] == str(planned)
    assert engine.counters()["blocks.total"] == planned.blocks - 1
    engine.close()


@pytest.mark.parametrize("layers", [1, 2, None])
@pytest.mark.parametrize(
    "shape", [{}, {"sliding_window": 64}, {"kv_lora_rank": 32, "num_kv_heads": 1}]
)
def test_the_first_layers_of_a_shape_are_those_of_the_built_directory(shape, layers):
    from labkit.models import resolve

    model = config.Model(shape=config.ModelShape(**shape))
    drafted = dataclasses.replace(
        options(), speculation=config.Speculation.draft, drafts=config.Drafts(draft_layers=layers)
    )
    planned, written = (
        memory_budget.footprint(drafted, source) for source in (model, resolve(model).path)
    )
    assert planned.draft_bytes == written.draft_bytes > 0
    assert planned.kv_bytes_per_token == written.kv_bytes_per_token


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_measured_activations_match_the_estimate(tiny_dir, rows):
    from labkit.engine.kv_cache_interface import KVCacheFactory
    from labkit.engine.model.cache_shapes import cache_shapes
    from labkit.engine.model.model_loader import load_model
    from labkit.engine.runner.packed_forward import choose_forward

    loaded = load_model(tiny_dir)
    shapes = cache_shapes(loaded).attention
    forward = choose_forward(loaded, config.Device.cpu)
    scheduler = config.Scheduler(max_num_seqs=rows, max_num_batched_tokens=512)
    kind = KVCacheFactory(config.Engine())
    measured = pool_sizing.measure_activation_bytes(forward, kind, shapes, scheduler, rows)
    estimated = model_footprint.from_shape(TINY, "tiny").activation_bytes(512, rows)
    assert measured % MIB == 0
    assert estimated - MIB // 4 < measured < 1.1 * estimated + MIB


def test_a_plan_counts_the_rows_of_drafts_and_their_states():
    machine, model = mac(64 * GIB), dataclasses.replace(MODEL, state_bytes=MIB)
    engine = config.Engine(budget=config.Budget(policy=config.BudgetPolicy.fraction))
    plain = memory_budget.plan(engine, model, machine)
    engine = dataclasses.replace(
        engine,
        speculation=config.Speculation.ngram,
        drafts=config.Drafts(num_draft_tokens=16),
    )
    drafted = memory_budget.plan(engine, model, machine)
    before, after = ({part.name: part.bytes for part in p.parts} for p in (plain, drafted))
    rows = 16 * 17
    assert after["activations"] == 4 * rows * model.vocab_size > before["activations"]
    assert before["16 state slots and a batch of 16"] == 32 * MIB
    assert after["16 state slots and a batch of 16 with 16 drafts each"] == (16 + rows) * MIB
    assert drafted.blocks < plain.blocks


@pytest.mark.parametrize(("tokens", "rows"), [(64, 4), (67, 4), (5, 5), (1, 1), (512, 3)])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_largest_step_has_the_most_tokens_and_rows(tokens, rows, num_drafts):
    from labkit.engine.kv_cache_interface import KVCacheFactory

    scheduler = config.Scheduler(max_num_seqs=rows, max_num_batched_tokens=tokens)
    kind, shapes, steps = KVCacheFactory(config.Engine()), (KVShape(1, 8, 8),), []
    engine = config.Engine(scheduler=scheduler)
    if num_drafts:
        engine.speculation = config.Speculation.ngram
        engine.drafts = config.Drafts(num_draft_tokens=num_drafts)
    logit_rows = engine.max_decode_rows
    pool_sizing.measure_activation_bytes(
        lambda batch, *_: steps.append(batch), kind, shapes, scheduler, logit_rows
    )
    batch, again = steps
    lengths = [tokens // rows + (row < tokens % rows) for row in range(rows)]
    num_blocks = sum(-(-n // 16) for n in lengths) + 1
    assert batch is again and batch.seq_lens.tolist() == lengths
    assert batch.total_q == tokens == len(batch.positions) == batch.seq_lens.sum()
    assert logit_rows == min(tokens, rows * (1 + num_drafts))
    assert batch.logit_rows.tolist() == list(range(tokens - logit_rows, tokens))
    assert batch.block_tables.max() == num_blocks - 1
    assert len(np.unique(batch.block_tables[batch.block_tables > 0])) == num_blocks - 1
    assert batch.block_tables.shape[1] * 16 >= batch.seq_lens.max()


@pytest.mark.parametrize(("policy", "times"), [("fixed", 0), ("mistralrs", 0), ("fraction", 1)])
def test_only_policies_that_subtract_activations_measure_them(tiny_dir, policy, times):
    calls = []

    def measure():
        calls.append(1)
        return 100 * MIB

    shapes = (KVShape(4, 64, 64),) * 4
    machine = simulated_mac("sim_m1_8gb")
    chosen = options(policy=config.BudgetPolicy(policy))
    if policy == "fraction":
        chosen.budget.fraction = 0.5
    pool = pool_sizing.size_pool(chosen, tiny_dir, machine, shapes, measure)
    assert len(calls) == times
    assert (100 * MIB in [part.bytes for part in pool.parts]) == bool(times)


def test_activations_of_a_costly_step_are_estimated(tiny_dir):
    chosen = options(policy=config.BudgetPolicy.fraction, fraction=0.5)
    chosen.scheduler.max_num_batched_tokens = 1 << 20
    machine = simulated_mac("sim_m3_ultra_512gb")

    def never():
        raise AssertionError("a forward of a million tokens is not cheap")

    pool = pool_sizing.size_pool(chosen, tiny_dir, machine, (KVShape(4, 64, 64),) * 4, never)
    assert max(part.bytes for part in pool.parts) > 1 << 30


@pytest.mark.parametrize(("below", "measured"), [(0, True), (1, False)])
def test_a_step_is_measured_up_to_the_limit_of_two_flops_per_weight_and_token(
    below, measured, tiny_dir, monkeypatch
):
    chosen = options(policy=config.BudgetPolicy.fraction, fraction=0.5)
    flops = 2 * model_footprint.from_directory(tiny_dir).matmul_weights * 64
    monkeypatch.setattr(pool_sizing, "MAX_PROFILING_FLOPS", flops - below)
    machine, shapes = simulated_mac("sim_m1_8gb"), (KVShape(4, 64, 64),) * 4
    pool = pool_sizing.size_pool(chosen, tiny_dir, machine, shapes, lambda: 100 * MIB)
    assert (100 * MIB in [part.bytes for part in pool.parts]) is measured


def test_the_setting_named_by_a_refusal_at_load_works(model_dir):
    tight = options(policy=config.BudgetPolicy.fraction, fraction=0.00001, machine="sim_m1_8gb")
    with pytest.raises(
        EngineError, match=r"set engine\.budget\.fraction=[\d.]+ or more"
    ) as refused:
        create(tight, model_dir("qwen3"))
    advised = re.search(r"fraction=([\d.]+) or more", str(refused.value))
    tight.budget.fraction = float(advised[1])
    engine = create(tight, model_dir("qwen3"))
    counters = engine.counters()
    assert counters["blocks.total"] >= 15 and counters["budget.fraction"] == 1
    assert "policy=fraction" in engine.notes["budget"]
    # It is the budget's pool that admission counts with.
    too_many = (int(counters["blocks.total"]) + 1) * 16
    engine._max_context = None  # longer than the pool
    engine.submit(Request("huge", (1,) * too_many, SamplingParams(max_tokens=2)))
    engine.submit(Request("good", (1, 2, 3), SamplingParams(max_tokens=2, ignore_eos=True)))
    ends = {}
    while engine.has_work():
        ends |= {event.request_id: event for event in engine.step() if event.finish_reason}
    assert ends["huge"].finish_reason == "error" and "KV blocks" in ends["huge"].error
    assert ends["good"].finish_reason == "length"
    engine.close()


def test_a_budget_is_refused_before_the_weights_are_loaded(tiny_dir, monkeypatch):
    from labkit.engine.runner import shared_models

    def never(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr(shared_models, "load_model", never)
    tight = options(blocks=1 << 40, machine="sim_m1_8gb")
    with pytest.raises(EngineError, match=r"set engine\.budget\.blocks=\d+ or less$"):
        create(tight, tiny_dir)
    tight.budget.blocks = 4
    with pytest.raises(AssertionError, match="loaded"):
        create(tight, tiny_dir)


FILL = """
import sys
import psutil
from labkit.engine import attention
from labkit.engine.attention.kv_and_state_shapes import KVShape
layers, heads, dim, blocks, block_size = map(int, sys.argv[1:])
backend = attention.create(backend="reference")
process = psutil.Process()
before = process.memory_info().rss
shapes = (KVShape(heads, dim, dim),) * layers
backend.allocate(shapes, blocks, block_size)
arrays = [*backend.keys, *backend.values]
block_bytes = block_size * sum(shape.token_bytes() for shape in shapes)
for array in arrays:
    array.fill(1.0)
print(process.memory_info().rss - before, sum(a.nbytes for a in arrays), block_bytes)
"""


def test_kv_bytes_predicted_allocated_and_measured_agree():
    """Within 2 %: what planning says, what NumPy holds, what becomes resident.

    In a process of its own: here, memory that other tests gave back would be used again.
    """
    blocks, block_size = 1024, 16
    predicted = model_footprint.from_shape(TINY, "tiny").kv_bytes_per_token * block_size * blocks
    numbers = (TINY.num_layers, TINY.num_kv_heads, TINY.head_dim, blocks, block_size)
    done = subprocess.run(
        [sys.executable, "-c", FILL, *map(str, numbers)], capture_output=True, text=True, check=True
    )
    measured, allocated, block_bytes = map(int, done.stdout.split())
    assert allocated == predicted == blocks * block_bytes == GIB // 8
    assert measured == pytest.approx(predicted, rel=0.02)
