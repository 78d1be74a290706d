"""A client's request, and its mutable state inside the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from labkit.engine.sampling.sampling_params import SamplingParams, as_integers

# The largest number of prompt tokens whose logits one step computes, over all requests. At a
# vocabulary of 128k tokens they take 128 MiB.
MAX_SCORED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its sampling parameters.

    ``priority`` orders requests under ``engine.scheduler.queue=priority``: the lower number is
    served first. ``messages`` is the conversation behind the prompt, for a server that applies its
    own chat template.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        ids = as_integers("prompt_token_ids", self.prompt_token_ids)
        object.__setattr__(self, "prompt_token_ids", ids)


QueueKey = tuple[float, int]  # unique: the second number is the arrival index


class RequestStatus(Enum):
    """The three states of a request. There is no prefill or decode state."""

    waiting = "waiting"
    running = "running"
    finished = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of a request inside the engine, written by the scheduler only.

    A step computes tokens until ``num_computed_tokens`` has caught up with ``token_ids``.
    Between the steps of a synchronous engine ``num_in_flight_tokens`` and
    ``num_output_placeholders`` are 0.
    """

    request: Request
    arrival_index: int = 0  # the number of requests that arrived before this one
    request_id: str = field(init=False)
    status: RequestStatus = RequestStatus.waiting
    token_ids: list[int] = field(init=False)  # prompt and output tokens known so far
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0  # whose keys and values are in the KV cache
    num_in_flight_tokens: int = 0  # that a launched step computes, with results to be recorded
    num_output_placeholders: int = 0  # output tokens that a launched step will sample (0 or 1)
    num_reserved_tokens: int = 0  # with KV memory; the blocks may have room for more
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held at the first admission
    # The places in the queue's order and in that of preemption, fixed for the request's life: the
    # smallest is served first, the largest preempted first.
    queue_key: QueueKey = field(init=False)
    preemption_key: QueueKey = field(init=False)
    num_preemptions: int = 0  # how often it was moved back to the waiting queue
    # The largest number of tokens that were computed or in flight at any preemption
    num_computed_before_preemption: int = 0
    # The log probabilities of the prompt recorded so far, in order (``PromptLogprobs``), and the
    # number of prompt rows that they cover
    scored_parts: list[Any] = field(default_factory=list)
    num_scored_rows: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.queue_key = self.preemption_key = 0, self.arrival_index

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
        """Tokens computed or in flight: the index at which the next chunk starts."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that can be scheduled now, including one that the step in flight will sample."""
        known = len(self.token_ids) + self.num_output_placeholders
        if known - self.num_prompt_tokens >= self.request.params.max_tokens:
            return 0  # nothing follows the last output token
        return known - self.num_computed_tokens - self.num_in_flight_tokens

    def admit(self, num_reserved_tokens: int, num_cached_tokens: int) -> None:
        """Start to run. The tokens in the prefix cache count as computed."""
        self.status = RequestStatus.running
        self.num_computed_tokens = num_cached_tokens
        self.num_reserved_tokens = num_reserved_tokens
        if not self.num_preemptions:  # otherwise the cache may have the request's own tokens
            self.num_cached_tokens = num_cached_tokens

    def preempt(self) -> None:
        """Wait again with nothing computed, but with all token ids."""
        self.status = RequestStatus.waiting
        self.num_computed_before_preemption = max(
            self.num_computed_before_preemption, self.num_scheduled_tokens
        )
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_output_placeholders = 0
        self.num_preemptions += 1

    def with_output(self, tokens: Sequence[int]) -> RequestState:
        """Return a copy with ``tokens`` appended, for sampling the token that follows drafts."""
        copy = RequestState(self.request)
        copy.token_ids = [*self.token_ids, *tokens]
        return copy

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before the request decodes: all but its newest output token.

        These are the prompt tokens and, after a preemption, the output tokens to compute again.
        """
        return max(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def is_prefill(self) -> bool:
        """Whether some of the ``num_prefill_tokens`` tokens are not scheduled yet."""
        scheduled = self.num_computed_tokens + self.num_in_flight_tokens
        return scheduled < self.num_prompt_tokens or scheduled < len(self.token_ids) - 1

    @property
    def max_kv_tokens(self) -> int:
        """Tokens in the KV cache after ``max_tokens`` output tokens, the last of which is not."""
        return self.num_prompt_tokens + self.request.params.max_tokens - 1


class ScoredRows(NamedTuple):
    """The rows ``[start, start + num_rows)`` of a request's prompt, which a step scores."""

    state: RequestState
    start: int
    num_rows: int
