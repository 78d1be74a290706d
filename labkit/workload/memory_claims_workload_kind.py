"""Memory claims (``workload.kind=headroom``): the RAM that each arm's budget would take.

The claims are computed; nothing is loaded or served. The machine may be simulated
(``engine.budget.machine``), so the claims on a large Mac can be computed on a small computer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.config import ConfigError, Experiment, KVLayout, require
from labkit.engine import memory_budget
from labkit.engine.memory_budget.required_kv_slots import slots_for
from labkit.machine.facts.simulated_macs import find_profile
from labkit.records import CaseRecord, Metric
from labkit.records.metric_registry import measured
from labkit.workload.requests.request_workload_kind import footprint
from labkit.workload.sources import source_of
from labkit.workload.workload_protocols import START_SECONDS, Estimate, Measurement, TurnContext

PROCESS_BYTES = 150 << 20


@dataclass(frozen=True)
class Claim:
    """An arm's claim on a machine's RAM, in bytes.

    ``total``: the machine's RAM. ``ceiling``: the policy's limit on weights, activations and KV
    memory together; 0: no limit. ``taken``: bytes claimed. ``tokens``: KV capacity.
    """

    total: int
    ceiling: int
    taken: int
    tokens: int


def claim(experiment: Experiment) -> Claim:
    """Compute the memory that an arm claims.

    An engine with a pool of blocks claims all memory that the policy grants. Without a pool, as in
    mlx_lm, memory grows with the requests, and the claim is the memory of the longest requests that
    can run together. Raises ``ConfigError`` if the policy refuses the model, or the model's sizes
    are unknown.
    """
    engine = experiment.engine
    planned = memory_budget.plan_for_arm(experiment)
    if planned is None or planned.full_blocks is None:
        raise ConfigError(
            f"workload.kind=headroom: the KV memory of engine={engine.name} with "
            f"model={experiment.model.name} cannot be planned; choose another engine or model"
        )
    total = find_profile(engine.budget.machine).total
    if engine.kv.layout is KVLayout.paged:
        taken = sum(part.bytes for part in planned.parts)
        tokens = (planned.full_blocks - 1) * engine.kv.block_size
        return Claim(total, planned.ceiling, taken, tokens)
    lengths = sorted((p + o for p, o in source_of(experiment).lengths(experiment)), reverse=True)
    in_flight = experiment.workload.concurrency or len(lengths)
    tokens = slots_for(engine.kv, lengths[: min(in_flight, engine.scheduler.max_num_seqs)])
    model = footprint(experiment)
    weights = sum(part.bytes for part in planned.parts[:-1])  # the last part is the KV memory
    taken = weights + tokens * memory_budget.kv_bytes_per_token(engine, model)
    return Claim(total, 0, taken, tokens)


def metrics(memory: Claim) -> tuple[Metric, ...]:
    """Return the metrics of a claim. The primary metric is the percentage of RAM taken.

    The percentage left may be negative: an engine without a pool may claim more than the total RAM.
    """
    share = 100 / memory.total
    return (
        measured("taken_pct", (memory.taken * share,), primary=True),
        measured("left_pct", (100 * (1 - memory.taken / memory.total),)),
        *([measured("ceiling_pct", (memory.ceiling * share,))] if memory.ceiling else []),
        measured("kv_tokens", (float(memory.tokens),)),
    )


class MemoryClaimKind:
    """Computes memory claims; see ``WorkloadKind``."""

    def check(self, experiment: Experiment) -> None:
        lengths = source_of(experiment).lengths(experiment)
        require(bool(lengths), f"workload={experiment.workload.name} has no requests")

    def prepare(self, experiment: Experiment) -> None:
        claim(experiment)

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        return None

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> MemoryClaims:
        return MemoryClaims(experiments)

    def estimate(self, experiment: Experiment) -> Estimate:
        return Estimate(START_SECONDS, PROCESS_BYTES)


@dataclass(frozen=True)
class MemoryClaims:
    """Memory claims of several arms; see ``InterleavedArms``."""

    experiments: Sequence[Experiment]

    def warm_up(self) -> None:
        """Do nothing, since nothing was loaded."""

    close = prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> Sequence[Measurement]:
        return [_measurement(experiment) for experiment in self.experiments]


def _measurement(experiment: Experiment) -> Measurement:
    engine = experiment.engine
    counters = (
        f"engine.{engine.name}",
        f"layout.{engine.kv.layout.value}",
        f"budget.{engine.budget.policy.value}",
    )
    case = CaseRecord(case="all", metrics=metrics(claim(experiment)))
    return Measurement(cases=(case,), counters=dict.fromkeys(counters, 1.0))


KIND = MemoryClaimKind()
