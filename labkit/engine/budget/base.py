"""What every budget policy shares: the question, the two answers and the Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from labkit import config
from labkit.engine.budget.amounts import size
from labkit.engine.budget.facts import ModelFacts
from labkit.machine.memory import Machine

Setting = tuple[str, int | float | str]
# vllm-metal starts no engine with fewer blocks; the null block is one of them.
LEAST_BLOCKS = 16


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
    def weights(self) -> Part:
        """The model's weights."""
        return Part("weights", self.model.weight_bytes)

    @property
    def step(self) -> Part:
        """The largest step's activations."""
        return Part("activations", self.activations)

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
    """Why there is no pool, in one line whose last part is what to set.

    Parameters
    ----------
    option
        What was set, as ``engine.budget.fraction=0.9``.
    asked
        What that asks for.
    free
        What there is, in words.
    parts
        What takes memory.
    settings
        The options that would fit; empty where none of this policy's would.
    direction
        ``or more``, ``or less`` or nothing.
    otherwise
        What to do where no setting fits.
    """

    option: str
    asked: str
    free: str
    parts: tuple[Part, ...]
    settings: tuple[Setting, ...] = ()
    direction: str = ""
    otherwise: str = ""

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


class Policy(Protocol):
    """How a KV pool's size is found. Pure: the same question has the same answer."""

    name: str
    profiles: bool
    """Whether the formula subtracts the activations, so that measuring them is worth it."""

    def decide(self, asked: Asked) -> Decision | Refusal:
        """Size the pool, or say why not."""


def decision(asked: Asked, *, policy: str, ceiling: int, blocks: int, step: bool) -> Decision:
    """Build a ``Decision``; ``step``: whether the policy counts the activations."""
    used = (asked.weights, asked.step) if step else (asked.weights,)
    return Decision(
        policy=policy,
        machine=asked.machine.name,
        ceiling=ceiling,
        blocks=blocks,
        block_bytes=asked.block_bytes,
        parts=(*used, asked.pool(blocks)),
    )


def nothing_fits(missing: int, machine: Machine) -> str:
    """Say what helps where no setting does."""
    larger = "choose another engine.budget.machine" if machine.simulated else "free memory"
    return f"no setting fits, {size(missing)} are missing: {larger} or take a smaller model"


def _write(value: int | float | str) -> str:
    """Write a number without an exponent."""
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0")
    return str(value)
