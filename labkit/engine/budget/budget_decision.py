"""The question put to a budget policy, its ceiling, and the two answers: a pool, or why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit import config
from labkit.engine.budget.model_footprint import ModelFacts
from labkit.machine.memory_profile import Machine

Setting = tuple[str, int | float | str]
LEAST = 2  # the null block and one that a token can lie in
# vllm-metal starts no engine with fewer blocks; the null block is one of them.
LEAST_BLOCKS = 16
UNITS = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1))


@dataclass(frozen=True)
class Part:
    """What takes memory, and how much (bytes)."""

    name: str
    bytes: int

    def __str__(self) -> str:
        """Write it as in ``weights 24.5 MiB``."""
        return f"{self.name} {size(self.bytes)}"


@dataclass(frozen=True)
class Asked:
    """The question put to a policy: a budget, for a model, on a machine.

    ``activations``: bytes of the largest step, estimated or measured.
    """

    budget: config.Budget
    block_size: int
    model: ModelFacts
    machine: Machine
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

    def used(self, *, step: bool = True) -> tuple[Part, ...]:
        """Return what a pool comes beside: the weights, and the largest step's activations."""
        weights = Part("weights", self.model.weight_bytes)
        return (weights, Part("activations", self.activations)) if step else (weights,)

    def used_bytes(self, *, step: bool = True) -> int:
        """Return the bytes of ``used``."""
        return sum(part.bytes for part in self.used(step=step))

    def blocks_in(self, ceiling: int, *, step: bool = True) -> int:
        """Return how many blocks ``ceiling`` bytes leave room for."""
        return (ceiling - self.used_bytes(step=step)) // self.block_bytes

    def pool(self, num_blocks: int) -> Part:
        """So many KV blocks, as a part."""
        return Part(f"{num_blocks} KV blocks", num_blocks * self.block_bytes)


@dataclass(frozen=True)
class Decision:
    """A pool that fits: its blocks, the null block included, and where all memory goes.

    ``ceiling``: the bytes that the policy lets weights, activations and pool take together.
    """

    policy: str
    machine: str
    ceiling: int
    blocks: int
    block_bytes: int
    parts: tuple[Part, ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"engine.budget.policy={self.policy}: of {size(self.ceiling)} on {self.machine}: "
            f"{'; '.join(map(str, self.parts))}"
        )


@dataclass(frozen=True)
class Refusal:
    """Why there is no pool, in one line whose last part is what to set."""

    option: str  # what was set, as ``engine.budget.fraction=0.9``
    asked: str  # what that asks for
    free: str  # what there is, in words
    parts: tuple[Part, ...]  # what takes memory
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
            options = " ".join(f"{key}={_write(value)}" for key, value in self.settings)
            advice = f"set {options} {self.direction}".rstrip()
        return "; ".join([f"{self.option}: {self.asked}", self.free, *map(str, self.parts), advice])


@dataclass(frozen=True)
class Ceiling:
    """What a policy lets weights, activations and pool take together (bytes)."""

    bytes: int
    refuse: Callable[[int], Refusal]  # says why so many blocks are none, and what to set
    blocks: int | None = None  # the pool asked for; None: as many blocks as fit
    free: int | None = None  # what may be claimed now; None: the policy does not look
    step: bool = True  # whether it counts the activations


def decide(asked: Asked, ceiling: Ceiling | Refusal) -> Decision | Refusal:
    """Size the pool under a ceiling, or say why not."""
    if isinstance(ceiling, Refusal):
        return ceiling
    fits = asked.blocks_in(ceiling.bytes, step=ceiling.step)
    least = LEAST_BLOCKS if ceiling.blocks is None else LEAST
    blocks = fits if ceiling.blocks is None else ceiling.blocks
    claimed = ceiling.free is None or ceiling.bytes <= ceiling.free
    if not (claimed and least <= blocks <= fits):
        return ceiling.refuse(blocks)
    return Decision(
        policy=asked.policy,
        machine=asked.machine.name,
        ceiling=ceiling.bytes,
        blocks=blocks,
        block_bytes=asked.block_bytes,
        parts=(*asked.used(step=ceiling.step), asked.pool(blocks)),
    )


def refuse(
    asked: Asked,
    says: str,
    pool: Part | None,
    *,
    settings: Sequence[Setting] = (),
    direction: str = "",
    missing: int,
    option: str = "",
    free: str = "",
    step: bool = True,
) -> Refusal:
    """Build a refusal; ``missing``: bytes, to be said where no setting fits.

    ``option`` is the policy unless said, ``free`` what the machine has now, ``step`` whether the
    activations are among the parts; no ``pool``: the weights alone are too much.
    """
    machine = asked.machine
    larger = "choose another engine.budget.machine" if machine.simulated else "free memory"
    return Refusal(
        option=option or f"engine.budget.policy={asked.policy}",
        asked=says,
        free=f"free are {free or size(machine.available)} on {machine.name}",
        parts=(*asked.used(step=step), *([] if pool is None else [pool])),
        settings=tuple(settings),
        direction=direction,
        otherwise=""
        if settings
        else f"no setting fits, {size(missing)} are missing: {larger} or take a smaller model",
    )


def size(count: int) -> str:
    """Write bytes in the largest unit that they reach."""
    for unit, scale, decimals in UNITS:
        if abs(count) >= scale:
            return f"{count / scale:.{decimals}f} {unit}"
    return f"{count} bytes"


def _write(value: int | float | str) -> str:
    """Write a number without an exponent."""
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0")
    return str(value)
