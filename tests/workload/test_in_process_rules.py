"""Real engines in one process: outputs, shared weights, and arms that need separate processes."""

import random
from contextlib import contextmanager

import pytest

from labkit import workload
from labkit.config import Experiment, from_plain
from labkit.workload import kind_of
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.workload_protocols import NoMachineKernels, TurnContext

SHAPE = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 512,
}
STATIC = {"admission": "static", "order": "prefill_first", "composition": "split"}
PADDED = {"kv": {"layout": "padded"}, "attention": {"backend": "sdpa"}}
ARMS = {
    "paged": {},
    "blocks of 8": {"kv": {"block_size": 8}, "prefix_cache": "hash"},
    "chunked": {"scheduler": {"chunk": 48, "max_num_seqs": 2}},
    "ngram": {"speculation": "ngram"},
    "draft": {"speculation": "draft", "drafts": {"draft_layers": 1}},
    "contiguous": {
        "name": "contiguous",
        "kv": {"layout": "contiguous"},
        "attention": {"backend": "sdpa"},
    },
    "naive": {"name": "naive", "scheduler": STATIC, **PADDED},
}
MLX_LM = {
    "mlx_lm": {"name": "mlx_lm", "threads": 1},
    "chunked": {"name": "mlx_lm", "threads": 1, "scheduler": {"chunk": 48, "max_num_seqs": 2}},
}


def experiment(**engine):
    return from_plain(
        Experiment,
        {
            "engine": {"blas": "stock", **engine},
            "model": {"name": "mini", "shape": SHAPE},
            "workload": {
                "name": "uniform",
                "prompts": {
                    "source": "synthetic",
                    "seed": 0,
                    "input": {"kind": "fixed", "tokens": 70},
                    "output": {"kind": "fixed", "tokens": 30},
                },
                "num_requests": 5,
                "concurrency": 3,
                "warmup": 1,
            },
            "ablation": {"arms": {"base": {}}},
        },
    )


@contextmanager
def whoever(arm):
    yield


def share(*engines, turn=whoever, order=7):
    experiments = [experiment(**engine) for engine in engines]
    kind = kind_of(experiments[0])
    kind.prepare(experiments[0])
    assert kind.apart(experiments) is None
    return kind.load(experiments, TurnContext(0, random.Random(order), turn, NoMachineKernels()))


def outputs(measurement):
    return measurement.cases[0].outputs


def counted(measurement):
    """Return the counters that no clock decides."""
    return {k: v for k, v in measurement.counters.items() if not k.endswith("_ms")}


@pytest.mark.parametrize("arms", [ARMS, MLX_LM], ids=["labkit", "mlx_lm"])
def test_interleaved_arms_have_the_outputs_and_counters_of_arms_served_alone(arms):
    interleaved = share(*arms.values())
    interleaved.warm_up()
    together = interleaved.measure(lambda text: None)
    interleaved.close()
    for (name, engine), measured in zip(arms.items(), together, strict=True):
        configured = experiment(**engine)
        alone = workload.measure(configured)
        assert outputs(measured) == outputs(alone), name
        assert counted(measured) == counted(alone), name
    assert len({measured.counters["steps.total"] for measured in together}) > 1


def test_arms_are_loaded_in_random_order_each_in_its_own_turn():
    orders = set()
    for seed in range(6):
        log = []

        @contextmanager
        def turn(arm, log=log):
            log.append(arm)
            yield

        share({}, {}, {}, turn=turn, order=seed).close()
        assert sorted(log) == [0, 1, 2]
        orders.add(tuple(log))
    assert len(orders) > 1


def packed(session):
    """Return the addresses of the weights that an engine multiplies with."""
    from labkit.cpu.matmul.packed_linear import PackedLinear

    forward = session.engine._loop._launcher.run_model._forward
    addresses, todo = set(), [forward._model]
    seen = set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, PackedLinear):
            addresses.add(item._panels.arrays[0].ctypes.data)
            continue
        slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        todo += [getattr(item, name) for name in slots if hasattr(item, name)]
        if hasattr(item, "__dict__"):
            todo += vars(item).values()
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
    return addresses


def test_arms_of_one_model_share_its_weights_and_engines_alone_do_not():
    interleaved = share({}, {"kv": {"block_size": 8}}, {"scheduler": {"chunk": 16}})
    first, *others = [packed(arm.session) for arm in interleaved._arms]
    assert len(first) > 4 and others == [first, first]
    interleaved.close()
    one, two = (share({}) for _ in range(2))
    assert not packed(one._arms[0].session) & packed(two._arms[0].session)
    one.close(), two.close()


def test_an_arm_that_cannot_load_closes_the_others(monkeypatch):
    from labkit.engine.engine_protocol import EngineError

    log, closed = [], []
    close = ServingSession.close
    monkeypatch.setattr(ServingSession, "close", lambda self: close(self) or closed.append(log[:]))

    @contextmanager
    def turn(arm):
        log.append(arm)
        yield

    with pytest.raises(EngineError, match=r"budget\.bytes"):
        share({}, {"budget": {"bytes": 1 << 50}}, {}, turn=turn)
    assert log[-1] == 1
    assert closed == [log] * (len(log) - 1) != []


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ([{}, {"blas": "openblas"}], "engine.blas is openblas in one arm and stock in another: "),
        ([{"mlx_cache_limit": 0}, {"mlx_cache_limit": 0}], "engine.mlx_cache_limit=0"),
        ([{}, {"memory_limit": 1 << 31}], "engine.memory_limit=2147483648"),
        ([{"threads": 1}, {"name": "mlx_lm", "threads": 1}], "engine=mlx_lm: in one process"),
        (
            [{"name": "mlx_lm", "threads": n} for n in (1, 2)],
            "engine.threads (of BLAS) is 1 in one arm and 2 in another: ",
        ),
        ([{}, {"pipeline": "overlap"}], "engine.pipeline=overlap"),
        (
            [{}, {"mlx": {"tf32": False}}],
            "engine.mlx.tf32 is False in one arm and None in another: MLX reads it once",
        ),
        (
            [{"mlx": {"bfs_max_width": n}} for n in (2, 20)],
            "engine.mlx.bfs_max_width is 2 in one arm and 20 in another: ",
        ),
        ([{}, {"name": "mine:Engine"}], "engine.name=mine:Engine"),
        (
            [{}, {"budget": {"policy": "vllm"}}],
            "engine.budget.policy=vllm sizes the pool by the free memory",
        ),
        (
            [{}, {"budget": {"wired_collector": "disabled"}}],
            "engine.budget.wired_collector is any in one arm and disabled in another: ",
        ),
    ],
)
def test_arms_in_separate_processes_give_the_reason_in_one_line(engines, reason):
    experiments = [experiment(**engine) for engine in engines]
    reason_given = kind_of(experiments[0]).apart(experiments)
    assert reason_given.startswith(reason) and "\n" not in reason_given


def test_arms_that_differ_in_engine_options_share_a_process():
    two = [{"name": "mlx_lm", "threads": 2, "dtype": kind} for kind in ("model", "bfloat16")]
    assert kind_of(experiment()).apart([experiment(**engine) for engine in two]) is None
    two = [{"mlx": {"bfs_max_width": 2}}] * 2
    assert kind_of(experiment()).apart([experiment(**engine) for engine in two]) is None
    simulated = {"budget": {"policy": "vllm", "machine": "sim_m1_pro_16gb"}}
    engines = [*ARMS.values(), {"threads": 1}, simulated]
    assert kind_of(experiment()).apart([experiment(**engine) for engine in engines]) is None
