"""Models and options that cannot be sharded are refused in one line before anything runs."""

import json

import pytest

from labkit import workload
from labkit.config import (
    KV,
    Attention,
    Budget,
    BudgetPolicy,
    ConfigError,
    DecodeShape,
    Device,
    Engine,
    Experiment,
    KVLayout,
    Model,
    ModelShape,
    Pipeline,
    Speculation,
    TensorParallel,
    from_plain,
)
from labkit.engine import parallel
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.memory_budget.pool_sizing import size_pool
from labkit.engine.parallel.model_sharding import sharding_error
from labkit.engine.parallel.rank_worker import ScheduleCheck
from labkit.engine.request import Request, RequestState
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput
from labkit.machine.facts.simulated_macs import find_profile
from labkit.models import resolve

KERNELS = {
    "name": "kernels",
    "kind": "kernel",
    "cases": [{"name": "c", "decode": 1, "context": 16}],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "contiguous", "kv": KV(layout=KVLayout.contiguous),
             "attention": Attention(backend="sdpa")},
            "engine.name=contiguous runs in a single process; set engine=paged",
        ),
        ({"attention": Attention(backend="reference")}, "backend=reference"),
        ({"attention": Attention(device=Device.emulated)}, "engine.attention.device=emulated"),
        ({"threads": 1}, "engine.threads=1 is less than one thread per rank"),
        ({"budget": Budget(policy=BudgetPolicy.vllm)}, "policy=vllm sizes the pool"),
        ({"memory_limit": 1 << 30}, "engine.memory_limit=1073741824 limits one process"),
        ({"speculation": Speculation.ngram}, "engine.speculation=ngram"),
        ({"pipeline": Pipeline.overlap}, "engine.pipeline=overlap"),
        ({"decode_shape": DecodeShape.fixed}, "engine.decode_shape=fixed"),
    ],
)  # fmt: skip
def test_options_that_exclude_ranks_are_refused(changes, message):
    Engine(**changes)  # alone it is fine
    with pytest.raises(ConfigError, match=r"engine\.parallel\.size=2: ") as caught:
        Engine(parallel=TensorParallel(2), **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_engines_refuse_parallel_size():
    with pytest.raises(
        ConfigError, match=r"parallel\.size=2: engine=mlx_lm does not have this option"
    ):
        Engine(name="mlx_lm", parallel=TensorParallel(2))
    with pytest.raises(ConfigError, match=r"parallel\.size=0: must be 1 to 64 \(ranks\)"):
        TensorParallel(0)


def experiment(size, shape=None, kind=None):
    plain = {
        "engine": {"parallel": {"size": size}},
        "model": {"shape": shape or {}},
        "ablation": {"arms": {"base": {}}},
    }
    return from_plain(Experiment, plain | ({"workload": kind} if kind else {}))


@pytest.mark.parametrize(
    ("size", "shape", "message"),
    [
        (8, {}, "model.shape.num_kv_heads=4"),
        (2, {"num_heads": 3, "num_kv_heads": 3}, "model.shape.num_heads=3"),
        (2, {"intermediate_size": 771}, "model.shape.intermediate_size=771"),
    ],
)
def test_a_shape_that_cannot_be_sharded_is_refused(size, shape, message):
    experiment(1, shape)
    with pytest.raises(ConfigError, match=rf"parallel\.size={size}: {message} is not a multiple"):
        experiment(size, shape)


def test_kernel_workloads_need_one_process():
    experiment(1, kind=KERNELS)
    with pytest.raises(ConfigError, match=r"parallel\.size=2: workload=kernels times the kernels"):
        experiment(2, kind=KERNELS)


def test_a_directory_that_cannot_be_sharded_is_refused():
    shape = ModelShape(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=512)
    path = resolve(Model(name="ranks_test", shape=shape)).path

    def at(size):
        plain = {"ablation": {"arms": {"base": {}}}, "engine": {"parallel": {"size": size}}}
        return from_plain(Experiment, {**plain, "model": {"name": "local", "path": str(path)}})

    parallel.check(at(1))
    parallel.check(at(2))
    with pytest.raises(ConfigError, match=r"size=4: .*: num_attention_heads=2 is not a mult"):
        parallel.check(at(4))


def test_gguf_types_that_cannot_be_divided_are_refused(tmp_path):
    block = {"mode": "q6_k", "bits": 6, "group_size": 16}
    entries = {"model.layers.0.mlp.up_proj": block, "lm_head": {**block, "mode": "iq4_nl"}}
    settings = {"num_attention_heads": 2, "quantization": {"group_size": 32, **entries}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    refusal = sharding_error(tmp_path, 2)
    assert "cannot divide the GGUF types Q6_K of its layers; set engine.weights=float32" in refusal
    assert sharding_error(tmp_path, 2, dequantized=True) is None
    del settings["quantization"]["model.layers.0.mlp.up_proj"]  # the output layer stays whole
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert sharding_error(tmp_path, 2) is None


def test_arms_with_ranks_do_not_share_a_process():
    arms = [experiment(1), experiment(2)]
    assert "engine.parallel.size=2: its ranks are separate processes" in workload.apart(arms)
    assert workload.apart([experiment(1)] * 2) is None


def test_the_budget_counts_the_pools_of_all_ranks_together(model_dir):
    machine = find_profile("sim_m1_pro_16gb")
    whole = (KVShape(2, 64, 64),) * 3
    half = (KVShape(1, 64, 64),) * 3
    blocks = [
        size_pool(
            Engine(parallel=TensorParallel(size), budget=Budget(bytes=1 << 22)),
            model_dir("qwen3"),
            machine,
            shapes,
            lambda: 0,
        ).blocks
        for size, shapes in ((1, whole), (2, half))
    ]
    assert blocks[0] == blocks[1] > 16


def scheduled(tokens=(1, 2, 3), start=0, count=3, name="a"):
    state = RequestState(Request(name, tokens))
    return SchedulerOutput((ScheduledChunk(state, start, count),))


def test_different_steps_have_different_digests():
    def digest(*steps):
        check = ScheduleCheck(2, lambda digest: None)
        for step in steps:
            check.check_step(step, Counters())
        return check.digest

    same = [digest(scheduled()) for _ in range(2)]
    assert same[0] == same[1] and len(same[0]) == 32
    others = [
        digest(scheduled(), scheduled()),
        digest(scheduled(name="b")),
        digest(scheduled(tokens=(1, 2, 4))),  # another token sampled in the step before
        digest(scheduled(count=2)),
        digest(scheduled(start=1, count=2)),
        digest(SchedulerOutput(())),
    ]
    assert len({same[0], *others}) == 1 + len(others)


def test_compared_steps_are_counted():
    sent, counters = [], Counters()
    check = ScheduleCheck(2, sent.append)
    for step in (scheduled(), scheduled(), SchedulerOutput(())):
        check.check_step(step, counters)
    assert counters.as_dict() == {"ranks.agreed": 2}
    assert len(set(sent)) == 3 and check.digest == sent[-1]

    def broken(digest):
        raise EngineError("another step")

    with pytest.raises(EngineError):
        ScheduleCheck(2, broken).check_step(scheduled(), counters)
    assert counters.as_dict() == {"ranks.agreed": 2}
