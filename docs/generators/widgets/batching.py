"""The same requests in a static batch, a continuous batch, and a continuous batch of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from docs.generators.widgets.page import Widget
from labkit import config
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_cache_interface import KVCache, KVCacheManager
from labkit.engine.kv_layout import contiguous, padded
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.memory_budget.required_kv_slots import CACHE_STEP_TOKENS
from labkit.engine.request import Request
from labkit.engine.runner.input_builder import InputBuilder
from labkit.engine.sampling.sampler import Sampled
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler
from labkit.engine.scheduler.scheduler_output import SchedulerOutput

Length = tuple[int, int]  # prompt and output tokens
SHAPES = (KVShape(1, 1, 1),)  # of a model that is never run
TOKEN_BYTES = SHAPES[0].token_bytes()
BLOCK_SIZE = config.KV().block_size
TOKEN_BUDGET = config.Scheduler().max_num_batched_tokens
# The scheduler of each lane: the presets engine=naive, contiguous and paged; paged reserves as
# vLLM does.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "static": {
        "admission": config.Admission.static,
        "order": config.Order.prefill_first,
        "composition": config.Composition.split,
    },
    "continuous": {},
    "paged": {"reservation": config.Reservation.optimistic},
}
# Prompts and answers as in the waste demo of "Inference Engines 2/N" (10, 200, 25 and 200 tokens).
MIXES: dict[str, list[Length]] = {
    "short and long answers": [(20, 10), (26, 200), (22, 25), (24, 200)] * 3,
    "answers alike": [(24, 100)] * 12,
    "long prompts": [(900, 60), (40, 60), (420, 30), (10, 120), (700, 20), (120, 90)] * 2,
}


@dataclass(frozen=True)
class Step:
    """A step of a simulation, in tokens. Requests are given by their indices.

    Parameters
    ----------
    computed
        The number of tokens by request, negative for a prefill chunk.
    idle
        The running requests without tokens in the step.
    finished
        The requests that have ended but whose rows the step still computes.
    preempted
        The requests that were preempted, in order.
    padding
        Tokens computed for no request.
    held, used
        The KV memory reserved during the step, and how much of it holds computed tokens of running
        requests.
    """

    computed: dict[int, int]
    idle: list[int]
    finished: list[int]
    preempted: list[int]
    padding: int
    held: int
    used: int


def serve(lane: str, requests: Sequence[Length], max_num_seqs: int, kv_tokens: int) -> list[Step]:
    """Serve requests that arrive together, by labkit's scheduler and KV managers, without a model.

    ``lane`` is the kind of batch, a key of ``SCHEDULERS``.

    Raises
    ------
    EngineError
        A request never fits into ``kv_tokens`` tokens of KV memory.
    """
    options = config.Scheduler(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=TOKEN_BUDGET, **SCHEDULERS[lane]
    )
    cache = _Cache(lane, kv_tokens)
    scheduler = _Scheduler(options, cache.manager)
    for index, (prompt, output) in enumerate(requests):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.add(Request(str(index), (0,) * prompt, params))
    steps = []
    while scheduler.has_work():
        steps.append(_step(scheduler, cache))
    return steps


class _Scheduler(Scheduler):
    """A scheduler that records the requests it preempts."""

    def __init__(self, options: config.Scheduler, cache: KVCacheManager) -> None:
        super().__init__(options, cache, frozenset())
        self.preempted: list[int] = []

    def preempt(self, request_id: str) -> None:
        """Move a running request back to the waiting queue."""
        super().preempt(request_id)
        self.preempted.append(int(request_id))

    def running(self) -> list[int]:
        """Return the running requests, in the order of admission."""
        return [int(request_id) for request_id in self._running]


class _Cache:
    """The KV cache of a lane (see ``serve``). All but ``paged`` have arrays, which grow."""

    def __init__(self, lane: str, kv_tokens: int) -> None:
        self._dense: KVCache | None = None
        self.manager: KVCacheManager
        if lane == "paged":
            pool = BlockPool(kv_tokens // BLOCK_SIZE + 1, BLOCK_SIZE)
            self.manager = PagedKVCacheManager(pool, block_bytes=BLOCK_SIZE * TOKEN_BYTES)
            return
        if lane == "static":
            self._dense = padded.create(SHAPES, kv_tokens, "float32", static=True)
        else:
            kv = config.KV(layout=config.KVLayout.contiguous)
            self._dense = contiguous.create(SHAPES, kv_tokens, "float32", kv)
        self.manager = self._dense.manager

    def prepare(self, output: SchedulerOutput) -> int:
        """Grow the arrays for a step, and return how many tokens are only padding."""
        if self._dense is None:
            return 0
        batch, _ = self._dense.prepare_step(InputBuilder(self.manager).build(output))
        return batch.total_q - output.total_tokens


def _step(scheduler: _Scheduler, cache: _Cache) -> Step:
    scheduler.preempted = []
    output = scheduler.schedule()
    padding = cache.prepare(output)
    chunks = {int(chunk.state.request_id): chunk for chunk in output.chunks}
    running = scheduler.running()
    step = Step(
        computed={
            index: -chunk.num_tokens if chunk.is_prefill else chunk.num_tokens
            for index, chunk in chunks.items()
        },
        idle=[index for index in running if index not in chunks],
        finished=sorted(map(int, cache.manager.lingering_requests())),
        preempted=scheduler.preempted,
        padding=padding,
        held=cache.manager.reserved_bytes // TOKEN_BYTES,
        used=scheduler.num_computed_tokens + output.total_tokens,
    )
    tokens = [Sampled(0, None)]
    scheduler.update(output, {c.state.request_id: tokens for c in output.chunks if c.samples})
    return step


def data() -> dict[str, Any]:
    """Return the mixes of requests, and the sizes that the simulation needs."""
    return {
        "mixes": MIXES,
        "lanes": list(SCHEDULERS),
        "sizes": {
            "token_budget": TOKEN_BUDGET,
            "block_size": BLOCK_SIZE,
            "growth_step": CACHE_STEP_TOKENS,
            "watermark": config.engine.scheduler.DEFAULT_WATERMARK,
        },
    }


WIDGET = Widget(
    name="batching",
    title="The same requests in a static, a continuous and a paged batch",
    source="After the waste demo and the latency demo of “Inference Engines 2/N: Batching and "
    "PagedAttention”.",
    mirrored="<code>labkit/engine/scheduler/scheduler.py</code> with the KV managers of "
    "<code>labkit/engine/kv_layout/</code>",
    functions=("batching",),
    data=data,
    text_page="structures",
)
