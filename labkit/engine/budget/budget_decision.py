"""The question put to a budget policy, its ceiling, and the two answers: a pool, or why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit import config
from labkit.engine.budget.model_footprint import ModelFootprint
from labkit.machine.memory_profile import MemoryProfile

Setting = tuple[str, int | float | str]
MIN_EXPLICIT_BLOCKS = 2  # the null block and one that a token can lie in
# vllm-metal starts no engine with fewer blocks; the null block is one of them.
MIN_AUTO_BLOCKS = 16
BYTE_UNITS = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1))


@dataclass(frozen=True)
class MemoryPart:
    """What takes memory, and how much (bytes)."""

    name: str
    bytes: int

    def __str__(self) -> str:
        """Write it as in ``weights 24.5 MiB``."""
        return f"{self.name} {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class PolicyInputs:
    """The question put to a policy: a budget, for a model, on a machine.

    ``activations``: bytes of the largest step, estimated or measured.
    """

    budget: config.Budget
    block_size: int
    model: ModelFootprint
    machine: MemoryProfile
    activations: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        return self.block_size * self.model.kv_bytes_per_token

    @property
    def fraction(self) -> float:
        """``engine.budget.fraction``, or its default."""
        given = self.budget.fraction
        return config.DEFAULT_FRACTION if given is None else given

    @property
    def policy(self) -> str:
        """The policy's word."""
        return self.budget.policy.value

    def used(self, *, step: bool = True) -> tuple[MemoryPart, ...]:
        """Return what a pool comes beside: the weights, and the largest step's activations."""
        weights = MemoryPart("weights", self.model.weight_bytes)
        return (weights, MemoryPart("activations", self.activations)) if step else (weights,)

    def used_bytes(self, *, step: bool = True) -> int:
        """Return the bytes of ``used``."""
        return sum(part.bytes for part in self.used(step=step))

    def blocks_in(self, ceiling: int, *, step: bool = True) -> int:
        """Return how many blocks ``ceiling`` bytes leave room for."""
        return (ceiling - self.used_bytes(step=step)) // self.block_bytes

    def pool(self, num_blocks: int) -> MemoryPart:
        """So many KV blocks, as a part."""
        return MemoryPart(f"{num_blocks} KV blocks", num_blocks * self.block_bytes)


@dataclass(frozen=True)
class BudgetDecision:
    """A pool that fits: its blocks, the null block included, and where all memory goes.

    ``ceiling``: the bytes that the policy lets weights, activations and pool take together.
    """

    policy: str
    machine: str
    ceiling: int
    blocks: int
    block_bytes: int
    parts: tuple[MemoryPart, ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"engine.budget.policy={self.policy}: of {format_bytes(self.ceiling)} on "
            f"{self.machine}: {'; '.join(map(str, self.parts))}"
        )


@dataclass(frozen=True)
class BudgetRefusal:
    """Why there is no pool, in one line whose last part is what to set."""

    option: str  # what was set, as ``engine.budget.fraction=0.9``
    asked: str  # what that asks for
    free: str  # what there is, in words
    parts: tuple[MemoryPart, ...]  # what takes memory
    settings: tuple[Setting, ...] = ()  # what would fit; empty where nothing would
    direction: str = ""  # ``or more``, ``or less`` or nothing
    otherwise: str = ""  # what to do where no setting fits

    def __post_init__(self) -> None:
        """Refuse a refusal that leaves its reader alone."""
        if bool(self.settings) == bool(self.otherwise):
            raise ValueError("a refusal names a setting or says what to do instead")

    def __str__(self) -> str:
        """Say it in one line."""
        advice = self.otherwise
        if self.settings:
            options = " ".join(f"{key}={_format_setting(value)}" for key, value in self.settings)
            advice = f"set {options} {self.direction}".rstrip()
        return "; ".join([f"{self.option}: {self.asked}", self.free, *map(str, self.parts), advice])


@dataclass(frozen=True)
class MemoryCeiling:
    """What a policy lets weights, activations and pool take together (bytes)."""

    bytes: int
    refuse: Callable[[int], BudgetRefusal]  # says why so many blocks are none, and what to set
    blocks: int | None = None  # the pool asked for; None: as many blocks as fit
    free: int | None = None  # what may be claimed now; None: the policy does not look
    step: bool = True  # whether it counts the activations


def apply_ceiling(
    asked: PolicyInputs, ceiling: MemoryCeiling | BudgetRefusal
) -> BudgetDecision | BudgetRefusal:
    """Size the pool under a ceiling, or say why not."""
    if isinstance(ceiling, BudgetRefusal):
        return ceiling
    fits = asked.blocks_in(ceiling.bytes, step=ceiling.step)
    least = MIN_AUTO_BLOCKS if ceiling.blocks is None else MIN_EXPLICIT_BLOCKS
    blocks = fits if ceiling.blocks is None else ceiling.blocks
    claimed = ceiling.free is None or ceiling.bytes <= ceiling.free
    if not (claimed and least <= blocks <= fits):
        return ceiling.refuse(blocks)
    return BudgetDecision(
        policy=asked.policy,
        machine=asked.machine.name,
        ceiling=ceiling.bytes,
        blocks=blocks,
        block_bytes=asked.block_bytes,
        parts=(*asked.used(step=ceiling.step), asked.pool(blocks)),
    )


def make_refusal(
    asked: PolicyInputs,
    says: str,
    pool: MemoryPart | None,
    *,
    settings: Sequence[Setting] = (),
    direction: str = "",
    missing: int,
    option: str = "",
    free: str = "",
    step: bool = True,
) -> BudgetRefusal:
    """Build a refusal; ``missing``: bytes, to be said where no setting fits.

    ``option`` is the policy unless said, ``free`` what the machine has now, ``step`` whether the
    activations are among the parts; no ``pool``: the weights alone are too much.
    """
    machine = asked.machine
    larger = "choose another engine.budget.machine" if machine.is_simulated else "free memory"
    return BudgetRefusal(
        option=option or f"engine.budget.policy={asked.policy}",
        asked=says,
        free=f"free are {free or format_bytes(machine.available)} on {machine.name}",
        parts=(*asked.used(step=step), *([] if pool is None else [pool])),
        settings=tuple(settings),
        direction=direction,
        otherwise=""
        if settings
        else f"no setting fits, {format_bytes(missing)} are missing: {larger} or take a smaller "
        "model",
    )


def format_bytes(count: int) -> str:
    """Write bytes in the largest unit that they reach."""
    for unit, scale, decimals in BYTE_UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.{decimals}f} {unit}"
    return f"{count} bytes"


def _format_setting(value: int | float | str) -> str:
    """Write a number without an exponent."""
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0")
    return str(value)
