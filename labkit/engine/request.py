"""Requests as a client states them, and their one mutable twin inside the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20


class Constraint(Protocol):
    """What one request's output must look like, token by token."""

    def allowed(self, output: Sequence[int], vocab_size: int) -> NDArray[np.bool_]:
        """Say which ids may come after ``output``: [vocab_size], at least one of them.

        A function of its arguments: drafts are asked about too, and may be taken back.
        """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Parameters
    ----------
    temperature
        0 is greedy; otherwise logits are divided by it before sampling.
    top_k, top_p
        Keep the ``top_k`` likeliest tokens (0: all), then the smallest set of them whose
        probability reaches ``top_p``.
    min_p
        Of these, keep the tokens at least this fraction as likely as the likeliest.
    repetition_penalty
        Positive logits of tokens in prompt or output are divided by it, negative ones
        multiplied (CTRL; Keskar et al. 2019); 1: off.
    presence_penalty, frequency_penalty
        Taken from the logits of tokens in the output: once, and per occurrence.
    logit_bias
        What is added to the logit of a token id.
    logprobs
        Tell the log probability of each token and of the so many likeliest (0 to 20);
        None: no. They are the model's own, before all of the above.
    max_tokens
        At most this many tokens are generated.
    stop
        A text or several that end the request, and are left out of its text. They need a
        tokenizer: ``LLM`` looks for them, an engine alone refuses them.
    stop_token_ids
        Token ids that end the request, besides the model's end-of-text ids.
    ignore_eos
        Do not stop at the model's end-of-text ids.
    seed
        Seed of this request's own random stream; None: derived from the request id. A
        draw depends on the seed and the position only, never on the batch.
    constraint
        Tokens that it does not allow are never chosen; not for two requests at once.

    Raises
    ------
    ValueError
        A value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    max_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    constraint: Constraint | None = field(default=None, hash=False, compare=False, repr=False)
    # Derived once, since they are asked for every token.
    adjusts: bool = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: allowed are 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: allowed are 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: allowed are above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: allowed are 0 (off) to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}={getattr(self, name)}: allowed are -2 to 2")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs={self.logprobs}: allowed are 0 to {MAX_LOGPROBS}, or None")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: allowed are 1 or more")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed}: allowed are 0 to 2**64 - 1")
        self._freeze()

    def _freeze(self) -> None:
        """Copy what the caller could still change, and derive the rest."""
        bias = {int(token): float(value) for token, value in dict(self.logit_bias).items()}
        for token, value in bias.items():
            if token < 0 or not math.isfinite(value):
                raise ValueError(f"logit_bias: {token}: {value}: ids are 0 or more, biases finite")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={stop}: allowed are texts that are not empty")
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        adjusts = bool(bias) or any(penalties) or self.constraint is not None
        plain = self.temperature == 0 and not adjusts and self.logprobs is None
        for name, item in {
            "logit_bias": bias,
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids),
            "adjusts": adjusts,
            "plain": plain,
        }.items():
            object.__setattr__(self, name, item)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, after bias and penalties."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its parameters.

    ``arrival`` is in seconds on the client's clock. ``priority`` counts where the
    scheduler queues by it: the lower number is served first. ``messages``: the conversation
    that the prompt was written from, for a server that writes it itself.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    priority: int = 0
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Freeze the prompt."""
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))


class RequestStatus(Enum):
    """Where a request stands. There is no prefill or decode state."""

    waiting = "waiting"
    running = "running"
    finished = "finished"


class RequestState:
    """A live request: ``num_computed_tokens`` catches up with the tokens known so far.

    Owned by the scheduler; nothing else writes to it. While a step is in flight (scheduled,
    its results not yet recorded) ``num_in_flight_tokens`` are being computed and
    ``num_unknown_tokens`` sampled; between the steps of a synchronous engine both are 0.
    ``serial`` counts arrivals, ``num_preemptions`` how often it was sent back to the queue;
    ``num_once_computed`` is the most that was computed, or in flight, before that.
    ``num_held_tokens`` is for how many tokens it holds KV memory at least.
    """

    __slots__ = (
        "num_computed_tokens",
        "num_held_tokens",
        "num_in_flight_tokens",
        "num_once_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_unknown_tokens",
        "request",
        "request_id",
        "serial",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request, serial: int = 0) -> None:
        self.request = request
        self.request_id = request.request_id
        self.serial = serial
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_held_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_unknown_tokens = 0
        self.num_once_computed = 0
        self.num_preemptions = 0
        self.status = RequestStatus.waiting

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens computed or being computed: where the next chunk starts."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that can be scheduled now: known, or known once the step in flight ends.

        The last token that a request may have is never computed.
        """
        known = len(self.token_ids) + self.num_unknown_tokens
        if known - self.num_prompt_tokens >= self.request.params.max_tokens:
            return 0
        return known - self.num_computed_tokens - self.num_in_flight_tokens

    def followed_by(self, tokens: Sequence[int]) -> RequestState:
        """Return a copy that has ``tokens`` too, as the sampling of a drafted row sees it."""
        twin = RequestState(self.request)
        twin.token_ids = [*self.token_ids, *tokens]
        return twin

    @property
    def num_caught_up(self) -> int:
        """Computed tokens from which on only the newest output token is pending: a decode."""
        return max(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def catching_up(self) -> bool:
        """Whether the prompt, or what a preemption undid, is not yet computed."""
        done = self.num_computed_tokens + self.num_in_flight_tokens
        return done < self.num_prompt_tokens or done < len(self.token_ids) - 1

    @property
    def max_cached_tokens(self) -> int:
        """KV slots needed to the end; the last token sampled is never computed."""
        return self.num_prompt_tokens + self.request.params.max_tokens - 1
