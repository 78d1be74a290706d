"""What a memory budget leaves: every arm's claim on a machine, computed, nothing loaded or served.

The machine may be a simulated one (``engine.budget.machine``), so that one computer tells what each
policy claims of another, and the pool may be larger than this computer's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.config import ConfigError, Experiment, KVLayout, require
from labkit.engine import budget, compute_dtype
from labkit.engine.budget import model_footprint
from labkit.engine.budget.kv_demand import slots_for
from labkit.machine import memory_profile
from labkit.records import CaseRecord, Metric
from labkit.workload.interleaving import START_SECONDS, TurnContext
from labkit.workload.measurement import Estimate, Measurement
from labkit.workload.sources import source_of

PROCESS_BYTES = 150 << 20


@dataclass(frozen=True)
class Claim:
    """What an arm takes of a machine (bytes of RAM ``total``).

    ``ceiling``: what its policy lets weights, activations and KV memory take together, 0 where it
    has none. ``tokens``: what its KV memory holds.
    """

    total: int
    ceiling: int
    taken: int
    tokens: int

    @property
    def left_pct(self) -> float:
        """The share of RAM that it leaves to everybody else."""
        return 100 * (1 - self.taken / self.total)


def claim(experiment: Experiment) -> Claim:
    """Compute an arm's claim.

    A pool of blocks takes all that the policy gives; without one (``auto``, as mlx_lm) memory grows
    with the requests, and the most that can be in flight together are what is counted.

    Raises
    ------
    ConfigError
        The policy refuses, or the model does not tell enough to plan with.
    """
    engine = experiment.engine
    planned = budget.check(experiment)
    if planned is None:
        raise ConfigError(
            f"workload.kind=headroom: engine={engine.name} with model={experiment.model.name} has "
            "no KV memory that could be planned; choose another engine or model"
        )
    total = memory_profile.find_profile(engine.budget.machine).total
    if engine.kv.layout is KVLayout.paged:
        taken = sum(part.bytes for part in planned.parts)
        tokens = (planned.blocks - 1) * engine.kv.block_size
        return Claim(total, planned.ceiling, taken, tokens)
    lengths = sorted((p + o for p, o in source_of(experiment).lengths(experiment)), reverse=True)
    tokens = slots_for(engine.kv, lengths[: experiment.workload.concurrency])
    model = model_footprint.from_model(
        experiment.model, compute_dtype.cast_target(engine), compute_dtype.matrix_storage(engine)
    )
    assert model is not None, "a plan was made of it"
    beside = sum(part.bytes for part in planned.parts[:-1])  # the last is the KV memory
    return Claim(total, 0, beside + tokens * budget.kv_bytes_per_token(engine, model), tokens)


def metrics(found: Claim) -> tuple[Metric, ...]:
    """Return what a record says of a claim; the share that is taken decides.

    What is left may be below 0: nothing stops ``auto`` from taking more than there is.
    """
    share = 100 / found.total
    ceiling = [Metric("ceiling_pct", "% of RAM", "higher", False, (found.ceiling * share,))]
    return (
        Metric("taken_pct", "% of RAM", "lower", True, (found.taken * share,)),
        Metric("left_pct", "% of RAM", "higher", False, (found.left_pct,)),
        *(ceiling if found.ceiling else []),
        Metric("kv_tokens", "tokens", "higher", False, (float(found.tokens),)),
    )


class Headroom:
    """The kind; see ``WorkloadKind``."""

    def check(self, experiment: Experiment) -> None:
        """Read the lengths; the budget is checked for every arm of any kind."""
        lengths = source_of(experiment).lengths(experiment)
        require(bool(lengths), f"workload={experiment.workload.name}: it has no request")

    def prepare(self, experiment: Experiment) -> None:
        """Compute it once: nothing is built or cached."""
        claim(experiment)

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        """Let arms share a process, whatever they are: nothing of them is loaded."""
        return None

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> Claims:
        """Keep what is asked."""
        return Claims(experiments)

    def estimate(self, experiment: Experiment) -> Estimate:
        """Count a process."""
        return Estimate(START_SECONDS, PROCESS_BYTES)


class Claims:
    """The claims of several arms; see ``InterleavedArms``."""

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        self._experiments = tuple(experiments)

    def warm_up(self) -> None:
        """Do nothing."""

    prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> Sequence[Measurement]:
        """Compute every arm's claim."""
        return [_measured(experiment) for experiment in self._experiments]

    def close(self) -> None:
        """Release nothing."""


def _measured(experiment: Experiment) -> Measurement:
    engine = experiment.engine
    engaged = (
        f"engine.{engine.name}",
        f"layout.{engine.kv.layout.value}",
        f"budget.{engine.budget.policy.value}",
    )
    case = CaseRecord(case="all", metrics=metrics(claim(experiment)))
    return Measurement(cases=(case,), counters=dict.fromkeys(engaged, 1.0))


KIND = Headroom()
