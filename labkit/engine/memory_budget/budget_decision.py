"""A budget policy's inputs, its memory ceiling, and the pool size or refusal that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit import config
from labkit.config import count_text
from labkit.engine.memory_budget.model_footprint import ModelFootprint
from labkit.engine.memory_budget.required_kv_slots import num_state_snapshots
from labkit.machine.facts.memory_capacity import MemoryProfile

Setting = tuple[str, int | float | str]  # an option's key and the value to set
# The smallest pool that a user may ask for: the null block and one block that holds tokens.
MIN_EXPLICIT_BLOCKS = 2
# The smallest pool that a policy may choose, null block included, as in vllm-metal.
MIN_AUTO_BLOCKS = 16
# The size assumed for a block of a model without keys and values, so that the number of blocks
# stays bounded.
MIN_BLOCK_BYTES = 1024
# Policies that do not subtract the activations from the memory.
WITHOUT_ACTIVATIONS = (config.BudgetPolicy.mistralrs, config.BudgetPolicy.free_memory)
# (unit, bytes, decimals shown), largest unit first.
BYTE_UNITS = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1))


@dataclass(frozen=True)
class MemoryPart:
    """A named consumer of memory and its size in bytes."""

    name: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class PolicyInputs:
    """Everything that a budget policy may depend on.

    ``activations`` is the size of the largest step's activations (bytes), estimated or measured.
    """

    engine: config.Engine
    model: ModelFootprint
    machine: MemoryProfile
    activations: int

    @property
    def budget(self) -> config.Budget:
        return self.engine.budget

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, at least ``MIN_BLOCK_BYTES``."""
        return max(MIN_BLOCK_BYTES, self.engine.kv.block_size * self.model.kv_bytes_per_token)

    @property
    def fraction(self) -> float:
        """``engine.budget.fraction``, or the policy's default if the option is not set."""
        if self.budget.fraction is not None:
            return self.budget.fraction
        if self.budget.policy is config.BudgetPolicy.free_memory:
            return config.DEFAULT_FREE_FRACTION
        return config.DEFAULT_FRACTION

    @property
    def policy(self) -> str:
        return self.budget.policy.value

    def fixed_parts(self) -> tuple[MemoryPart, ...]:
        """Return the memory that the policy counts besides the pool: weights, states, activations.

        Recurrent states need memory twice: for all slots, and for the batch of the running step,
        which has the states after each draft token, too.
        """
        parts = [MemoryPart("weights", self.model.weight_bytes)]
        if self.model.draft_bytes:
            parts.append(MemoryPart("weights of the draft model", self.model.draft_bytes))
        if self.model.state_bytes:
            batch, drafts = self.engine.scheduler.max_num_seqs, self.engine.num_lookahead_tokens
            slots = batch + num_state_snapshots(self.engine)
            name = f"{slots} state slots and a batch of {batch}"
            if drafts:
                name += f" with {count_text(drafts, 'draft')} each"
            num_states = slots + batch * (1 + drafts)
            parts.append(MemoryPart(name, num_states * self.model.state_bytes))
        if self.budget.policy not in WITHOUT_ACTIVATIONS:
            parts.append(MemoryPart("activations", self.activations))
        return tuple(parts)

    def fixed_bytes(self) -> int:
        return sum(part.bytes for part in self.fixed_parts())

    def blocks_under(self, ceiling: int) -> int:
        """Return how many blocks fit in ``ceiling`` bytes; negative if the fixed parts do not."""
        return (ceiling - self.fixed_bytes()) // self.block_bytes

    def pool_part(self, num_blocks: int) -> MemoryPart:
        return MemoryPart(f"{num_blocks} KV blocks", num_blocks * self.block_bytes)


@dataclass(frozen=True)
class BudgetDecision:
    """A KV pool that fits, and the memory parts that the policy counted.

    ``blocks`` includes the null block. ``ceiling`` is the number of bytes that the policy allows
    for all ``parts`` together: weights, the pool, and activations if the policy counts them.
    ``full_blocks`` are the blocks of the layers that keep every token. They are more than
    ``blocks`` with ``engine.kv.window_pools``, and None if the layers' windows are unknown.
    """

    policy: str
    machine: str
    ceiling: int
    blocks: int
    block_bytes: int
    parts: tuple[MemoryPart, ...]
    full_blocks: int | None

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        """Return one line with the policy, its ceiling, the machine's name and the parts."""
        return (
            f"engine.budget.policy={self.policy} divides {format_bytes(self.ceiling)} on "
            f"{self.machine}: {'; '.join(map(str, self.parts))}"
        )


@dataclass(frozen=True)
class BudgetRefusal:
    """The reason that a pool cannot be sized, as one line that ends in advice.

    Example: ``engine.budget.fraction=0.9: policy fraction asks for 28.80 GiB of 32.00 GiB RAM;
    24.00 GiB are free on sim_m1_pro_32gb; weights 1.00 GiB; ...; set engine.budget.fraction=0.75
    or less``. ``settings`` are those that the line advises; empty if no setting fits.
    """

    message: str
    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class MemoryCeiling:
    """The bytes that a policy allows for weights, activations and pool together."""

    bytes: int
    refusal: Callable[[int], BudgetRefusal]  # of a pool of that many blocks
    blocks: int | None = None  # the requested pool; None: as many blocks as fit
    free: int | None = None  # bytes free now; None: the policy does not check free memory


def apply_ceiling(
    inputs: PolicyInputs, ceiling: MemoryCeiling | BudgetRefusal
) -> BudgetDecision | BudgetRefusal:
    """Size the pool under a policy's ceiling, or return a refusal.

    The pool is refused if the ceiling exceeds the free memory or does not hold the requested
    blocks, or if the pool would have fewer blocks than a pool needs (``MIN_EXPLICIT_BLOCKS`` for a
    requested size, else ``MIN_AUTO_BLOCKS``). If ``ceiling`` is a refusal, it is returned as it is.
    """
    if isinstance(ceiling, BudgetRefusal):
        return ceiling
    max_blocks = inputs.blocks_under(ceiling.bytes)
    min_blocks = MIN_AUTO_BLOCKS if ceiling.blocks is None else MIN_EXPLICIT_BLOCKS
    blocks = max_blocks if ceiling.blocks is None else ceiling.blocks
    is_free = ceiling.free is None or ceiling.bytes <= ceiling.free
    if not (is_free and min_blocks <= blocks <= max_blocks):
        return ceiling.refusal(blocks)
    return BudgetDecision(
        policy=inputs.policy,
        machine=inputs.machine.name,
        ceiling=ceiling.bytes,
        blocks=blocks,
        block_bytes=inputs.block_bytes,
        parts=(*inputs.fixed_parts(), inputs.pool_part(blocks)),
        full_blocks=blocks,
    )


def make_refusal(
    inputs: PolicyInputs,
    problem: str,
    pool: MemoryPart | None,
    *,
    settings: Sequence[Setting] = (),
    direction: str = "",
    missing: int,
    option: str = "",
    free: str = "",
) -> BudgetRefusal:
    """Build a refusal that advises either ``settings`` or freeing ``missing`` bytes.

    ``problem``: the memory that ``option`` asks for (``engine.budget.policy`` by default), or the
    reason that it is refused. ``pool``: the pool that was requested (None: the weights alone do not
    fit). ``direction``: ``or more``, ``or less`` or empty. ``free``: by default the machine's
    available bytes.
    """
    machine = inputs.machine
    if settings:
        options = " ".join(f"{key}={_format_setting(value)}" for key, value in settings)
        advice = f"set {options} {direction}".rstrip()
    else:
        remedy = "choose another engine.budget.machine" if machine.is_simulated else "free memory"
        advice = (
            f"no setting fits, because {format_bytes(missing)} are missing; {remedy} or use a "
            "smaller model"
        )
    option = option or f"engine.budget.policy={inputs.policy}"
    available = f"{free or format_bytes(machine.available)} are free on {machine.name}"
    parts = map(str, (*inputs.fixed_parts(), *([] if pool is None else [pool])))
    line = "; ".join([f"{option}: {problem}", available, *parts, advice])
    return BudgetRefusal(line, tuple(settings))


def format_bytes(count: int) -> str:
    """Format a number of bytes in the largest fitting binary unit, for example ``24.5 MiB``."""
    for unit, scale, decimals in BYTE_UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.{decimals}f} {unit}"
    return f"{count} bytes"


def _format_setting(value: int | float | str) -> str:
    """Format an option's value for the command line, a float without an exponent."""
    return f"{value:.9f}".rstrip("0") if isinstance(value, float) else str(value)
