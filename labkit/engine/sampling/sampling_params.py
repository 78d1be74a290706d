"""Sampling parameters: how a request's tokens are sampled, and when the request ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20
NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# Whether each may be None.
INTEGERS = {
    "top_k": False, "max_tokens": False, "logprobs": True, "prompt_logprobs": True, "seed": True,
}  # fmt: skip


class SamplingError(ValueError):
    """No token can be sampled for a request, because of its own parameters.

    The message is one line. Only this request ends; the engine continues.
    """


class Constraint(Protocol):
    """A rule that allows or forbids every next token of one request's output."""

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Return a mask of the ids that may follow ``output``: bool [vocab_size], not all false.

        The result must depend on the arguments only, because ``output`` may end with draft
        tokens that are rejected later.

        Raises ``SamplingError`` if ``output`` breaks the rule, or the mask cannot be computed. The
        request ends with this error, unless only draft tokens at the end of ``output`` break the
        rule: such drafts are rejected anyway.
        """


class LogitBias(Mapping[int, float]):
    """By token id, the number that is added to the token's logit: immutable, for all its steps.

    ``bias`` must be valid: ids of 0 or more, finite numbers.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = dict(bias)

    def __getitem__(self, token: int) -> float:
        return self._bias[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __repr__(self) -> str:
        return repr(self._bias)

    @cached_property
    def token_ids(self) -> NDArray[np.intp]:
        return np.fromiter(self._bias, np.intp, len(self._bias))

    @cached_property
    def added_logits(self) -> NDArray[np.float32]:
        values = np.fromiter(self._bias.values(), np.float64, len(self._bias))
        with np.errstate(over="ignore"):  # the sampler refuses infinite logits
            return values.astype(np.float32)


NO_BIAS = LogitBias({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are sampled, and when the request ends.

    Parameters
    ----------
    temperature
        0: greedy. Otherwise logits are divided by the temperature before sampling.
    top_k, top_p
        Keep the ``top_k`` likeliest tokens (0: all), then the smallest set of them whose
        probability reaches ``top_p``.
    min_p
        Of the tokens that ``top_k`` and ``top_p`` keep, keep those whose probability is at least
        this fraction of the likeliest token's.
    repetition_penalty
        Positive logits of tokens in the prompt or the output are divided by this factor, negative
        logits are multiplied by it (CTRL; Keskar et al. 2019). 1: off.
    presence_penalty, frequency_penalty
        Subtracted from the logits of tokens in the output: once per token, and once per
        occurrence.
    logit_bias
        By token id, a number that is added to its logit.
    logprobs
        Return the log probability of each sampled token and of the likeliest ``logprobs`` tokens (0
        to 20). None: no log probabilities. They are computed from the model's own logits, before
        temperature, filters, penalties and bias are applied.
    prompt_logprobs
        Return the log probability of each prompt token from the second on, and of the likeliest
        ``prompt_logprobs`` tokens at its position (0 or more). None: no log probabilities. Such a
        request takes nothing from the prefix cache, because the logits of all its prompt tokens
        must be computed, and gets no draft tokens.
    prompt_logprob_ids
        With ``prompt_logprobs``: token ids whose log probabilities are returned too, int32
        [prompt tokens - 1, m]. Row i belongs to the position of prompt token i + 1.
    max_tokens
        The largest number of tokens to generate.
    stop
        One or several texts that end the request. The stop text is not part of the output text.
        Matching needs a tokenizer, so ``LLM`` does it. An engine used without ``LLM`` refuses them.
    stop_token_ids
        Token ids that end the request, in addition to the model's end-of-text ids.
    ignore_eos
        Do not stop at the model's end-of-text ids.
    seed
        Seed of this request's own random stream (None: derived from the request id). A random
        number depends on the seed and the position only, never on the batch.
    constraint
        Tokens that the constraint does not allow are never chosen. An instance serves one
        request only.

    Raises
    ------
    ValueError
        A value is out of range or not of its type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_ids: NDArray[np.int32] | None = field(
        default=None, hash=False, compare=False, repr=False
    )
    max_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    constraint: Constraint | None = field(default=None, hash=False, compare=False, repr=False)
    # Derived once, because the sampler reads them for every token. ``bias``: ``logit_bias`` with
    # its arrays. ``adjusts``: bias, penalties or a constraint change the logits. ``plain``: greedy
    # on the model's own logits, without log probabilities.
    bias: LogitBias = field(init=False, repr=False, compare=False)
    adjusts: bool = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        logprobs, scored, seed = self.logprobs, self.prompt_logprobs, self.seed
        for name, is_valid, allowed in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            ("logprobs", 0 <= (logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None"),
            ("prompt_logprobs", (scored or 0) >= 0, "0 or more, or None"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("seed", 0 <= (seed or 0) < 1 << 64, "0 to 2**64 - 1"),
        ):
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)}: must be {allowed}")
        if self.prompt_logprob_ids is not None and self.prompt_logprobs is None:
            raise ValueError("prompt_logprob_ids needs prompt_logprobs; set it to 0 or more")
        self._freeze()

    def _check_types(self) -> None:
        """Check the numbers here, because a wrong type would fail in a step of the whole batch."""
        for name in NUMBERS:
            if not _is_finite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: not a finite number")
        for name, nullable in INTEGERS.items():
            value = getattr(self, name)
            if value is not None or not nullable:
                object.__setattr__(self, name, as_integers(name, [value])[0])
        ids = self.prompt_logprob_ids
        if ids is not None and not (isinstance(ids, np.ndarray) and ids.dtype.kind in "iu"):
            raise ValueError("prompt_logprob_ids: not a NumPy array of integers")

    def _freeze(self) -> None:
        """Copy the values that the caller could still change, and set the derived fields."""
        bias = _checked_bias(self.logit_bias)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={stop}: every text must be a string that is not empty")
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        adjusts = bool(bias) or any(penalties) or self.constraint is not None
        plain = self.temperature == 0 and not adjusts and self.logprobs is None
        for name, item in {
            "logit_bias": bias,
            "stop": stop,
            "stop_token_ids": as_integers("stop_token_ids", self.stop_token_ids),
            "bias": bias,
            "adjusts": adjusts,
            "plain": plain,
        }.items():
            object.__setattr__(self, name, item)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen, after bias and penalties."""
        return self.temperature == 0

    def changed_outside(self, supported: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield name and value of the parameters not in ``supported`` that are not at default."""
        default = SamplingParams()
        for item in fields(self):
            value = getattr(self, item.name)
            if item.init and item.name not in supported and value != getattr(default, item.name):
                yield item.name, value


def _checked_bias(bias: Mapping[int, float]) -> LogitBias:
    """Return a valid copy of ``logit_bias``, or raise ``ValueError``. A ``LogitBias`` is valid."""
    if isinstance(bias, LogitBias):
        return bias
    if not isinstance(bias, Mapping):
        raise ValueError("logit_bias: not a mapping of token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in zip(as_integers("logit_bias", bias), bias.values(), strict=True):
        if token < 0 or not _is_finite(value):
            raise ValueError(
                f"logit_bias={{{token}: {value!r}}}: the id must be 0 or more, the bias finite"
            )
        checked[token] = float(value)
    return LogitBias(checked)


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def as_integers(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Return values as a tuple of integers, which ``name`` describes in the error message.

    Raises ``ValueError`` if ``values`` cannot be iterated over, or a value is not an integer.
    """
    values = _as_tuple(name, values)
    remaining = iter(values)
    try:
        return tuple(map(operator.index, remaining))
    except TypeError:
        wrong = values[-1 - operator.length_hint(remaining)]  # the last that was taken
        text = " ".join(repr(wrong).split())  # an array has several lines
        raise ValueError(f"{name}: {text} is not an integer") from None


def _as_tuple(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise ValueError(f"{name}={values!r}: not a list") from None
