"""The rule that makes a study tiny, and a launcher that runs its arms in this process."""

import dataclasses
import importlib.util
import time

from planted_runs import PlantedRuns

from labkit import workload
from labkit.config import Budget, LengthKind, ModelShape, Speculation
from labkit.experiment.worker.run_draft import RunDraft, StageTimer

NOISE_FLOORS = ("decode_burst", "inert_padding", "noise_floor", "waste_demo")
# Experiments that show what they are about only with more of something: name and overrides.
ASKED: dict[str, list[str]] = {
    # Only what computes more than there is room for is bounded, and what is small is not.
    "prefill_room": [
        "ablation.arms.p0016_floor={engine.scheduler.max_num_seqs:32,"
        "engine.scheduler.max_num_batched_tokens:40,engine.scheduler.prefill_floor:40}",
    ],
    "chunked_prefill": ["workload.prompts.input.values=[32,32,32,32,32,1200]"],
    # Two sessions, and a pool that holds one.
    "burst_collapse": [
        *(f"workload.prompts.{key}" for key in ("requests=6", "turns=3", "prefix_groups=2")),
        "ablation.arms.calm={engine.prefix_cache:hash,engine.budget.blocks:60,"
        "workload.concurrency:1}",
        "ablation.arms.burst={engine.prefix_cache:hash,engine.budget.blocks:60,"
        "workload.concurrency:2}",
    ],
    # The control says what the noise floor is.
    **{name: ["design.control=true"] for name in NOISE_FLOORS},
    # A pool that does not hold six requests to their ends.
    "preemption": [
        "ablation.arms.full={engine.budget.blocks:64}",
        "ablation.arms.optimistic={engine.budget.blocks:64,"
        "engine.scheduler.reservation:optimistic}",
    ],
    "padding_picture": ["engine.scheduler.max_num_batched_tokens=128"],
}
ASKED["servers"] = ["~ablation.arms.vllm"]  # 3 GB to install, and minutes to start
if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("xllamacpp") is None:
    ASKED["serving_overhead"] = ["~ablation.arms.llama_cpp_server"]  # the extra llamacpp
    ASKED["servers"] += ["~ablation.arms.llama_cpp"]
# By what lengths are divided, where it is not PART.
LESS = {
    "padding_picture": 4,
    "kv_layout": 1,
    "kv_layouts": 1,
    "preemption": 1,
    "burst_collapse": 1,
    "chunked_prefill": 1,
    "window_pools": 4,
    "prefill_room": 1,
}
ONCE = [
    "design.blocks=1",
    "design.runs_per_block=1",
    "design.looks=[]",
    "design.confirm=0",
    "design.control=false",
    "design.eliminate=false",
]
SHAPE = ModelShape(
    hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512
)
WINDOWS = {"window_tokens": 16, "num_windows": 16}  # of a scored text
FEW, PART = 6, 16  # requests at most; and of a length
POOL = 64 << 20  # bytes, where an experiment leaves it at the default


def tiny_words(name=None):
    """Return the overrides that make a command's study short. ``name``: of its experiment."""
    return [*ONCE, *ASKED.get(name, [])]


def tiny_cell(cell, name=None):
    """Return a composed cell whose arms are tiny. ``name``: of its experiment or ablation."""
    part, shape = LESS.get(name, PART), tiny_shape(cell.experiments.values())
    arms = {arm: tiny(experiment, part, shape) for arm, experiment in cell.experiments.items()}
    return dataclasses.replace(cell, experiments=arms)


def tiny_shape(experiments):
    """Return one shape for all arms: heads for every rank, layers for every draft model.

    It has sliding windows where the study's model has.
    """
    engines = [experiment.engine for experiment in experiments]
    drafts = [e.drafts.draft_layers or 1 for e in engines if e.speculation is Speculation.draft]
    ranks = [engine.parallel.size for engine in engines]
    shapes = [experiment.model.shape for experiment in experiments]
    windows = [32 for shape in shapes if shape is not None and shape.sliding_window is not None]
    return dataclasses.replace(
        SHAPE,
        num_layers=max([1, *drafts, *(2 for _ in windows)]),
        num_kv_heads=max(ranks),
        sliding_window=max(windows, default=None),
    )


class InProcessLauncher(PlantedRuns):
    """Measures in this process, without what a process has one of."""

    def __init__(self, cells):
        super().__init__()
        self._arms = {cell.name: cell.experiments for cell in cells}

    def pilot(self, cell, seconds):
        """The arms have one round."""

    def fields(self, run, cell):
        return {}

    def record(self, run, cell):
        draft = RunDraft(super().record(run, cell), StageTimer(time.monotonic_ns()))
        with draft.catch_failures():
            measured = workload.measure(self._arms[cell.name][run.arm])
            draft.add_measurement(measured, cell.arm(run.arm))
        return draft.record


def tiny(experiment, part, shape):
    workload, model = experiment.workload, experiment.model
    if not workload.has_engine:
        return dataclasses.replace(experiment, workload=clips(workload))
    kernel = workload.times_kernels
    if kernel:
        smaller = launches(workload)
    else:
        smaller = WINDOWS if workload.kind == "scoring" else requests(workload, part)
    workload = dataclasses.replace(workload, warmup=1, **smaller)
    if not kernel:
        model = dataclasses.replace(model, shape=shape, packaged=None, path=None)
    engine = experiment.engine
    if engine.budget == Budget() and engine.name not in ("mlx_lm", "openai"):
        engine = dataclasses.replace(engine, budget=Budget(bytes=POOL))
    if engine.name == "openai":  # no time is claimed here, so the client may be late
        server = dataclasses.replace(engine.server, most_late_ms=10_000.0)
        engine = dataclasses.replace(engine, server=server)
    return dataclasses.replace(experiment, workload=workload, model=model, engine=engine)


def clips(workload):
    """Return a workload of the same clips, short and small."""
    short = {"seconds": 2.0, "width": 96, "height": 64, "events": 1}
    made = [dataclasses.replace(c, gop=c.gop and min(c.gop, 12), **short) for c in workload.made]
    return dataclasses.replace(workload, made=made)


def launches(workload):
    window = None if workload.window is None else -(-workload.window // 8)
    cases = list(map(small, workload.cases))
    return {"cases": cases, "repeats": 1, "head_dim": 32, "window": window}


def small(case):
    names = ("decode", "context", "prefill", "chunk", "past")
    sizes = {name: -(-getattr(case, name) // 8) for name in names}
    return dataclasses.replace(case, **sizes, factor=1)


def requests(workload, part):
    prompts = workload.prompts
    if prompts.source == "synthetic":
        lengths = {name: shorter(getattr(prompts, name), part) for name in ("input", "output")}
        prefix = -(-prompts.prefix_tokens // part)
        prompts = dataclasses.replace(prompts, **lengths, prefix_tokens=prefix)
        known = prompts.requests
    elif prompts.source == "listed":
        prompts = dataclasses.replace(
            prompts, listed=[briefer(one, part) for one in prompts.listed]
        )
        known = len(prompts.listed)
    else:
        known = FEW
    few = min(FEW, known, workload.num_requests or FEW)
    return {"prompts": prompts, "num_requests": few}


def briefer(one, part):
    most = one.max_tokens
    return one if most is None else dataclasses.replace(one, max_tokens=-(-most // part))


def shorter(lengths, part):
    """Return lengths divided; only those that this law reads, as the others must stay."""
    read = {LengthKind.fixed: ("tokens",), LengthKind.listed: ("values",)}
    overrides = {}
    for name in read.get(lengths.kind, ("low", "high", "median")):
        value = getattr(lengths, name)
        if value is not None:
            many = isinstance(value, list)
            overrides[name] = [-(-n // part) for n in value] if many else -(-value // part)
    return dataclasses.replace(lengths, **overrides)
